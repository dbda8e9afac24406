"""For compiled models: the compiler decides what to recompute, within the share that it is given.

`torch._functorch.config.activation_memory_budget` is one setting for the whole process, read when a
graph is compiled. Here it holds for one model: it is set around its calls and restored after them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stepscope.errors import UsageError
from stepscope.fix.saved.memory_saver import MemorySaver
from stepscope.fix.saved.module_hooks import ModuleHooks
from stepscope.records.figures import percent

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_USUAL_SHARE = 0.5


class CompiledSaver(MemorySaver):
    """Attached to a compiled model before its first step. There is no plan: the compiler has it."""

    def __init__(self, model: torch.nn.Module, share: float) -> None:
        self._latest = None
        self.ended = None
        self.notes = [
            f"The model is compiled: graphs compiled from now on save about {percent(share)} "
            "of what they would save."
        ]
        self._model = model
        self._start_over()
        self._share = share
        self._patches: list[Any] = []
        self._handles = []
        self._inner = ModuleHooks(self._enters_inner, self._leaves_inner)
        self._compiled_call = model._compiled_call_impl
        if self._compiled_call is not None:  # hooks would be compiled, too
            model._compiled_call_impl = self._call
        else:
            self._handles = [
                model.register_forward_pre_hook(self._enters_compiled, prepend=True),
                model.register_forward_hook(self._leaves_compiled, always_call=True),
            ]

    def remove(self) -> None:
        super().remove()
        if self._compiled_call is not None:
            self._model._compiled_call_impl = self._compiled_call

    @contextmanager
    def forward(self, *inputs: Any) -> Iterator[None]:
        """Around the model and a compiled loss."""
        del inputs
        with _budget(self._share):
            yield

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with _budget(self._share):
            return self._compiled_call(*args, **kwargs)

    def _enters_compiled(self, module: Any, args: Any) -> None:
        del module, args
        patch = _budget(self._share)
        patch.__enter__()
        self._patches.append(patch)

    def _leaves_compiled(self, *passed: Any) -> None:
        del passed
        if self._patches:
            self._patches.pop().__exit__(None, None, None)


def save_compiled(
    model: torch.nn.Module, reduce: float | None, others: dict[str, Any]
) -> CompiledSaver:
    """Raises UsageError for targets that the compiler does not know."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise UsageError(
            f"{given[0]}= is not supported for a compiled model. The compiler takes a share "
            "of what it would save: pass reduce=0.5. Or call save_memory on the model before "
            "it is compiled"
        )
    return CompiledSaver(model, _USUAL_SHARE if reduce is None else 1 - reduce)


def _budget(share: float) -> Any:
    from torch._functorch import config

    return config.patch(activation_memory_budget=share)
