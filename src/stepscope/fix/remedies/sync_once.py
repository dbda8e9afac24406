"""Exchange gradients once a step where a script adds up those of several backward passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

from stepscope.errors import TrainingStopped
from stepscope.fix.declaration import Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.remedies.accumulation_loop import find_loop
from stepscope.fix.remedies.ddp import why_no_ddp
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess

# DDP is told before each forward whether the pass exchanges gradients, as its no_sync() does.
# Should gradients be used before they were exchanged, because a step came after fewer passes than
# usual, they are averaged right there: what is trained never depends on the number of passes.
#
# Ranks must stay equal. A rank that fails here ends its process, and where it still can, it tells
# the others first: they end theirs, too.

_BUCKET_BYTES = 32 * 2**20  # the memory that averaging needs beside the gradients
_MOST_MISSED = 2  # steps in a row that came too early
# What uses gradients between backward and the optimizer's step, beside clipping.
_USERS = {
    "torch.nn.utils": ("get_total_norm",),
    "torch.amp.grad_scaler": ("GradScaler.unscale_",),
}


class GradientExchange:
    """Counts the backward passes of each step. `passes` of None: those of the step before."""

    def __init__(self, training: TrainingProcess, passes: int | None) -> None:
        self._tell, self._refuse = training.telling(), training.refusing()
        self._usual = passes
        self._replicas: list[ref[Any]] = []  # in the order in which all ranks build them
        self._switched_off: WeakSet[Any] = WeakSet()  # for the pass that runs
        self._not_exchanged: WeakSet[Any] = WeakSet()
        self._passes = self._missed = 0
        self._early = self._in_step = self._over = False
        training.after_building("ddp", self._add)
        training.around_root(_or_stop(self._before_forward))
        training.before_backward(_or_stop(self._before_backward))
        training.after_backward(_or_stop(self._after_backward))
        training.before_step(_or_stop(self._optimizer_begins))
        training.after_step(_or_stop(self._optimizer_ends))
        training.before_clipping(_or_stop(self._exchange_now))
        for module, names in _USERS.items():
            _call_first(training, module, names, training.guarded(_or_stop(self._exchange_now)))
        begins = training.guarded(_or_stop(self._step_begins))
        _call_first(training, "torch.amp.grad_scaler", ("GradScaler.step",), begins)

    def _add(self, made: Made) -> None:
        ddp = made.object
        if ddp.static_graph:
            self._refuse("DDP does not support no_sync() with a static graph")
        elif any(getattr(module, "sparse", False) for module in ddp.modules()):
            self._refuse("the model has sparse gradients")
        else:
            self._replicas.append(ref(ddp))

    def _before_forward(self, _module: Any, _args: Sequence[Any], _kwargs: dict[str, Any]) -> None:
        self._switch_on_again()
        # A pass inside the optimizer's step, in a closure, is the last of its step.
        is_last = self._usual is None or self._passes >= self._usual - 1 or self._in_step
        if is_last or self._over:
            return
        for ddp in self._alive():
            # The script's own no_sync() and join() stay as they are.
            if ddp.require_backward_grad_sync and not ddp._join_config.enable:
                ddp.require_backward_grad_sync = False
                self._switched_off.add(ddp)

    def _before_backward(self, _outputs: Any) -> None:
        self._not_exchanged |= self._switched_off

    def _after_backward(self) -> None:
        self._passes += 1
        if self._switched_off:
            self._tell(f"gradients are exchanged in the last of {self._usual} backward passes")
        self._switch_on_again()

    def _switch_on_again(self) -> None:
        for ddp in self._switched_off:
            ddp.require_backward_grad_sync = True
        self._switched_off.clear()

    def _step_begins(self) -> None:
        if not self._passes:
            return
        self._exchange_now()
        self._missed = self._missed + 1 if self._early else 0
        self._early = False
        if self._missed >= _MOST_MISSED and not self._over:
            self._over = True
            self._tell(
                f"steps do not come every {self._usual} passes, so gradients are exchanged in "
                "every pass again"
            )
        if self._usual is None and self._passes > 1:
            self._usual = self._passes
        self._passes = 0

    def _optimizer_begins(self, _optimizer: Any) -> None:
        self._step_begins()
        self._in_step = True

    def _optimizer_ends(self, _optimizer: Any) -> None:
        self._passes = 0
        self._in_step = False

    def _exchange_now(self) -> None:
        """Average what no pass has exchanged."""
        # A forward that exchanges sets this: its pass exchanged all that had been added up.
        waiting = [
            ddp
            for ddp in self._alive()
            if ddp in self._not_exchanged and not ddp.require_forward_param_sync
        ]
        self._not_exchanged.clear()
        for ddp in waiting:
            average_gradients(ddp)
            self._early = True
            self._tell(
                f"gradients that were used after {self._passes} instead of {self._usual} "
                "passes were averaged first"
            )

    def _alive(self) -> list[Any]:
        return [ddp for reference in self._replicas if (ddp := reference()) is not None]


def average_gradients(ddp: Any) -> None:
    """As DDP does it: a parameter without a gradient counts as zero where another rank has one.

    Raises on every rank if one of them cannot: what may fail on one alone is done, and its outcome
    exchanged, before any gradient is changed.
    """
    import torch
    import torch.distributed as dist

    group = ddp.process_group
    parameters = [p for p in ddp._module_parameters if p.requires_grad]
    device = parameters[0].device
    with torch.no_grad():
        known = [p.grad is not None for p in parameters]
        used = torch.tensor(known, dtype=torch.int32, device=device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
        exchanged = [p for p, is_used in zip(parameters, used.tolist(), strict=True) if is_used]
        error, buckets = None, []
        try:
            buckets = _prepared_buckets(exchanged)
        except Exception as raised:
            error = raised
        failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
        if error is not None:
            raise error
        if failed.item():
            raise RuntimeError("another rank could not prepare them")
        for flat, views, gradients in buckets:
            torch._foreach_copy_(views, gradients)
            flat.div_(dist.get_world_size(group))
            dist.all_reduce(flat, group=group)
            torch._foreach_copy_(gradients, views)


def _prepared_buckets(parameters: list[Any]) -> list[tuple[Any, list[Any], list[Any]]]:
    """A flat tensor, its parts, and the gradients they stand for: one exchange each. The flat
    tensors of one type share their memory."""
    import torch

    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    alike: dict[Any, list[list[Any]]] = {}
    for gradient in (parameter.grad for parameter in parameters):
        groups = alike.setdefault((gradient.dtype, gradient.device), [[]])
        held = sum(one.nbytes for one in groups[-1])
        if groups[-1] and held + gradient.nbytes > _BUCKET_BYTES:
            groups.append([])
        groups[-1].append(gradient)
    buckets = []
    for (dtype, device), groups in alike.items():
        sizes = [sum(one.numel() for one in gradients) for gradients in groups]
        memory = torch.empty(max(sizes), dtype=dtype, device=device)
        for size, gradients in zip(sizes, groups, strict=True):
            flat = memory[:size]
            parts = flat.split([one.numel() for one in gradients])
            views = [part.view(one.shape) for part, one in zip(parts, gradients, strict=True)]
            buckets.append((flat, views, gradients))
    return buckets


def _or_stop(act: Callable[..., Any]) -> Callable[..., Any]:
    """End the process if `act` fails: from then on ranks would train with unequal gradients."""

    def act_or_stop(*args: Any) -> Any:
        try:
            return act(*args)
        except Exception as error:
            raise TrainingStopped(
                "sync-once could not average gradients over the ranks, so their weights "
                f"would differ from now on ({type(error).__name__}: {error}). Run without "
                "sync-once"
            ) from error

    return act_or_stop


def _call_first(
    training: TrainingProcess, module: str, names: Sequence[str], act: Callable[[], Any]
) -> None:
    """Call `act` before these functions and methods of torch."""

    def replace(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @training.surrounds
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            act()
            return original(*args, **kwargs)

        setattr(owner, name, call)

    def attach(loaded: Any) -> None:
        for name in names:
            owner, _, last = name.rpartition(".")
            holder = getattr(loaded, owner) if owner else loaded
            if hasattr(holder, last):
                replace(holder, last)

    training.when_imported(module, attach)


# Gradients exchanged once a step where a script adds up those of several backward passes.
#
# DDP exchanges them in every pass unless all but the last are under its no_sync(). The value is the
# number of passes; without one it is learnt from the first step, which is left as it is.


def fits(facts: ScriptFacts, value: str) -> str | None:
    why_not = why_no_ddp(facts)
    if why_not is not None:
        return why_not + _words_for_others(facts)
    passes = facts.passes_per_step
    if passes is None:
        return "the number of backward passes per step varies"
    if passes == 1:
        return "a step has one backward pass"
    if facts.synced_passes != passes:
        return "some backward passes already run under no_sync()"
    if any(built.options.get("static_graph") for built in facts.of_kind("ddp")):
        return "DDP does not support no_sync() with a static graph"
    if value and value != str(passes):
        return f"a step has {passes} backward passes, not {value}"
    return None


def values_of(facts: ScriptFacts) -> tuple[str, ...]:
    passes = facts.passes_per_step
    return (str(passes),) if passes is not None and passes > 1 else ("",)


def apply(training: TrainingProcess, value: str) -> None:
    GradientExchange(training, int(value) if value else None)


def patch(script: Script, value: str) -> Proposal:
    loop = find_loop(script)
    if loop is None:
        return Proposal(by_hand=(_by_hand(script.facts),))
    header = f"with contextlib.nullcontext() if {loop.is_last} else {loop.ddp}.no_sync():"
    source = loop.source
    wrapped = source.wrap(loop.first, loop.last, header)
    return Proposal(edits=(*source.ensure_import("contextlib"), *wrapped))


def _by_hand(facts: ScriptFacts) -> str:
    where = f" ({facts.backward[0].words})" if facts.backward else ""
    return (
        f"put forward and backward{where} under `with model.no_sync():`, except in the last "
        "pass before optimizer.step(). Here model is the DistributedDataParallel"
    )


def _words_for_others(facts: ScriptFacts) -> str:
    """What does the same without DDP."""
    if (facts.passes_per_step or 1) > 1 and facts.world_size > 1 and not facts.of_kind("ddp"):
        return (
            ". For FSDP write model.set_requires_gradient_sync(is_last_pass), for Accelerate "
            "`with accelerator.accumulate(model):`"
        )
    return ""


SYNC_ONCE = Fix(
    values_of=values_of,
    accepts=lambda value: value.isdecimal() and int(value) > 1,
    fits=fits,
    apply=apply,
    patch=patch,
)
