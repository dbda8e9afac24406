"""What `save_memory` returns for a compiled model: graphs are planned as they are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.saved.memory_saver import MemorySaver
from stepscope.fix.saved.save_plan import SavePlan
from stepscope.fix.saved.step_promise import SavePromise
from stepscope.records.change_values import MemoryTarget

if TYPE_CHECKING:
    from stepscope.fix.saved.compiled.graph_plan import GraphPlan

_USUAL_SHARE = 0.5
# Simulated over measured peaks, and estimated over measured steps: docs/records/save-memory.md.
_PEAK_LOW, _PEAK_HIGH = 0.92, 1.08
_STEP_LOW, _STEP_HIGH = 0.5, 1.3
_NO_HOOK = (
    "this torch has no place for a plan in compiled graphs (torch._inductor.config has no "
    "custom_partitioner_fn): the compiler's own budget is set instead"
)
_NOTHING = (
    "no graph was planned in the first step: this model was compiled before save_memory was "
    "called, or by a backend other than Inductor"
)
_TAKEN = "torch._inductor.config.custom_partitioner_fn is set already, so graphs stay as they are"


class CompiledSaver(MemorySaver):
    """Attached to a compiled model before its first step.

    Settings of the compiler hold for the whole process. They are changed while this model runs,
    because that is when its graphs are compiled, and restored after each call.
    """

    def __init__(
        self, model: torch.nn.Module, target: MemoryTarget, *, dry_run: bool, rounding: bool
    ) -> None:
        self.notes: list[str] = []
        self.ended: str | None = None
        self._model = model
        self._target, self._dry_run, self._rounding = target, dry_run, rounding
        self._start_over()
        self._handles: list[Any] = []
        self._settings = self._choose_settings()
        self._before: list[list[Any]] = []  # of calls that have begun
        self._compiled_call = model._compiled_call_impl
        if self._compiled_call is not None:  # hooks would be compiled, too
            model._compiled_call_impl = self._call
        else:
            self._handles = [
                model.register_forward_pre_hook(self._enters_compiled, prepend=True),
                model.register_forward_hook(self._leaves_compiled, always_call=True),
            ]

    def _start_over(self) -> None:
        super()._start_over()
        self.graphs: list[GraphPlan] = []

    @property
    def plan(self) -> SavePlan | None:
        """Of all graphs compiled so far; None before the first."""
        from stepscope.fix.saved.compiled.graph_plan import join

        return join(self.graphs, self._target) if self.graphs else None

    @property
    def settled(self) -> bool:
        return bool(self.graphs)

    @property
    def held_bytes(self) -> int | None:
        return None

    @property
    def measured_step_ns(self) -> int | None:
        return None

    @property
    def promise(self) -> SavePromise | None:
        """Peaks are of what the graphs make; times are worked out from their operators."""
        plan = self.plan
        if plan is None:
            return None
        step_ns = plan.step_ns + plan.extra_ns
        return SavePromise(
            peak_bytes_before=plan.peak_bytes_before,
            peak_bytes=plan.peak_bytes,
            peak_low_bytes=round(_PEAK_LOW * plan.peak_bytes),
            peak_high_bytes=round(_PEAK_HIGH * plan.peak_bytes),
            step_ns_before=plan.step_ns,
            step_ns=step_ns,
            step_low_ns=round(_STEP_LOW * step_ns),
            step_high_ns=round(_STEP_HIGH * step_ns),
            whole_step=False,
            measured_step=False,
            planned_step_ns=step_ns,
        )

    def remove(self) -> None:
        """Graphs that are compiled keep their plan; later ones get none."""
        self._detach()
        if self._compiled_call is not None:
            self._model._compiled_call_impl = self._compiled_call

    @contextmanager
    def forward(self, *inputs: Any) -> Iterator[None]:
        """Around the model and a compiled loss."""
        del inputs
        self._change_settings()
        try:
            yield
        finally:
            self._restore_settings()

    def __deepcopy__(self, memo: Any) -> CompiledSaver:
        """A copy of the model has graphs of its own, which this saver plans as well."""
        del memo
        return self

    def _choose_settings(self) -> list[tuple[Any, str, Any]]:
        """Return the compiler's settings to change: where, which and to what."""
        import torch._functorch.config as functorch
        import torch._inductor.config as inductor

        if not hasattr(inductor, "custom_partitioner_fn"):
            self.notes.append(_NO_HOOK)
            share = _USUAL_SHARE if self._target.reduce is None else 1 - self._target.reduce
            return [(functorch, "activation_memory_budget", share)]
        if inductor.custom_partitioner_fn is not None:
            self.ended = _TAKEN
            self.notes.append(_TAKEN)
            return []
        from stepscope.fix.saved.compiled.partitioner import MemoryPartitioner

        partitioner = MemoryPartitioner(
            self._target,
            dry_run=self._dry_run,
            exact=not self._rounding,
            on_plan=self.graphs.append,
            on_failure=self._note,
        )
        # That cache holds graphs as they were split: with it nothing would be planned.
        return [
            (inductor, "custom_partitioner_fn", partitioner),
            (functorch, "enable_autograd_cache", False),
        ]

    def _change_settings(self) -> None:
        self._before.append([getattr(place, name) for place, name, _value in self._settings])
        for place, name, value in self._settings:
            setattr(place, name, value)

    def _restore_settings(self) -> None:
        if self._before:
            if not self.graphs and not self.notes and torch.is_grad_enabled():
                self._note(_NOTHING)
            values = self._before.pop()
            for (place, name, _value), value in zip(self._settings, values, strict=True):
                setattr(place, name, value)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with self.forward():
            return self._compiled_call(*args, **kwargs)

    def _enters_compiled(self, module: Any, args: Any) -> None:
        del module, args
        self._change_settings()

    def _leaves_compiled(self, *passed: Any) -> None:
        del passed
        self._restore_settings()
