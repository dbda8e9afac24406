"""The optimizer's update: foreach, fused, and gradients that are dropped instead of zeroed."""

from __future__ import annotations

import ast
import functools
import inspect
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stepscope.fix.declaration import Fix
from stepscope.fix.proposal import Proposal, Script, set_arguments
from stepscope.fix.python_source import Edit, PythonSource
from stepscope.records.script_facts import Built, ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess


# The optimizer's update as a few calls for all parameters: foreach=True.
#
# It is torch's default on CUDA devices, but not on CPUs.

# Optimizers of torch whose update has several forms: one tensor at a time, foreach, fused.

# Where `foreach` stands if it is given without its name; only Adagrad allows that.
_POSITIONS = {"foreach": 6}


def _why_not_switch(made: Made, form: str) -> str | None:
    """Why an optimizer that is about to be built cannot use this form of update."""
    if not made.takes(form):
        return f"{made.name} has no {form} form"
    if made.value("differentiable"):
        return f"{made.name} is differentiable, which needs one tensor at a time"
    if not str(type(made.object).step.__module__).startswith("torch.optim"):
        return f"{made.name} has its own update"
    return None


def _why_none_switches(built: list[Built], form: str) -> str | None:
    """The same for a whole script, before anything is tried."""
    if not built:
        return "no torch optimizer was built"
    able = [one for one in built if form in one.options]
    if not able:
        return f"{built[0].type} has no {form} form"
    if all(one.options.get("fused") for one in able):
        return "the optimizer is fused already"
    if all(one.options.get("differentiable") for one in able):
        return "a differentiable optimizer updates one tensor at a time"
    return None


_BY_DEFAULT = ("cuda", "xpu", "mtia")  # devices on which torch chooses foreach itself
_TENSORS = ("lr", "betas")


def _why_not_foreach_optimizer(facts: ScriptFacts, value: str) -> str | None:
    optimizers = facts.of_kind("optimizer")
    why = _why_none_switches(optimizers, "foreach")
    if why is not None:
        return why
    able = [built for built in optimizers if _can_use_foreach(built)]
    if not able:
        return "the optimizer already uses foreach, or its learning rate is a tensor"
    if facts.device in _BY_DEFAULT and all(b.options["foreach"] is None for b in able):
        return f"torch already uses foreach on {facts.device}"
    return None


def _can_use_foreach(built: Built) -> bool:
    """Tensors as options need capturable=True, which CPUs do not have."""
    options = built.options
    has_tensors = any(options.get(name) == "<Tensor>" for name in _TENSORS)
    return (
        "foreach" in options
        and not (options["foreach"] or options.get("fused") or options.get("differentiable"))
        and (not has_tensors or bool(options.get("capturable")))
    )


def _apply_foreach_optimizer(training: TrainingProcess, value: str) -> None:
    import torch

    tell, leave_alone = training.telling(), training.leaving_alone()

    def change(made: Made) -> None:
        why = _why_not_switch(made, "foreach")
        if why is None and made.value("fused"):
            why = f"{made.name} is fused"
        if why is None and isinstance(made.value("lr"), torch.Tensor):
            why = f"the learning rate of {made.name} is a tensor"
        if why is not None:
            leave_alone(why)
        elif not made.value("foreach"):
            made.arguments["foreach"] = True
            tell(f"{made.name}: foreach=True")

    training.before_building("optimizer", change)


def _patch_foreach_optimizer(script: Script, value: str) -> Proposal:
    return set_arguments(
        script, "optimizer", {"foreach": "True"}, where=_can_use_foreach, positions=_POSITIONS
    )


FOREACH_OPTIMIZER = Fix(
    fits=_why_not_foreach_optimizer, apply=_apply_foreach_optimizer, patch=_patch_foreach_optimizer
)


# The optimizer's update as one kernel per group of parameters: fused=True.

_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia")
_TRAINER = 'give TrainingArguments optim="adamw_torch_fused": the Trainer builds the optimizer'


def _why_not_fused_optimizer(facts: ScriptFacts, value: str) -> str | None:
    if facts.device not in _DEVICES:
        return f"torch has no fused optimizers for {facts.device}"
    return _why_none_switches(facts.of_kind("optimizer"), "fused")


def _apply_fused_optimizer(training: TrainingProcess, value: str) -> None:
    """The model may move to its device after the optimizer is built: so the parameters are looked
    at once they have gradients."""
    tell, refuse = training.telling(), training.refusing()
    leave_alone = training.leaving_alone()
    unchecked: WeakKeyDictionary[Any, bool | None] = WeakKeyDictionary()  # the script's foreach

    def change(made: Made) -> None:
        why = _why_not_switch(made, "fused")
        if why is not None:
            leave_alone(why)
        elif not made.value("fused"):
            unchecked[made.object] = made.value("foreach")
            made.arguments |= {"fused": True, "foreach": None}
            tell(f"{made.name}: fused=True")

    def check() -> None:
        for optimizer, foreach in list(unchecked.items()):
            parameters = _with_gradients(optimizer)
            if not parameters:
                continue
            del unchecked[optimizer]
            why = why_not_fused(type(optimizer), parameters)
            if why is not None:
                _undo(optimizer, foreach)
                refuse(f"{type(optimizer).__name__}: {why}")

    training.before_building("optimizer", change)
    training.after_backward(check)


def _with_gradients(optimizer: Any) -> list[Any]:
    fused = [group for group in getattr(optimizer, "param_groups", ()) if group.get("fused")]
    return [p for group in fused for p in group["params"] if p.grad is not None]


def why_not_fused(kind: type[Any], parameters: list[Any]) -> str | None:
    """What torch would raise in the first step of this kind of optimizer."""
    from torch.utils import _foreach_utils

    devices = set(_foreach_utils._get_fused_kernels_supported_devices())
    devices -= {"cuda"} if _is_for_cpus_only(kind) else set()
    for parameter in parameters:
        if parameter.device.type not in devices:
            return f"torch has no fused update for parameters on {parameter.device.type}"
        if not parameter.is_floating_point():
            return f"torch has no fused update for {parameter.dtype}"
        if parameter.grad.is_sparse:
            return "torch has no fused update for sparse gradients"
    return None


def _is_for_cpus_only(kind: type[Any]) -> bool:
    """As Adagrad is before torch 2.13; only its own check of the parameters says so."""
    try:
        return "cuda_unsupported=True" in inspect.getsource(kind._init_group)
    except (AttributeError, OSError, TypeError):
        return False


def _undo(optimizer: Any, foreach: bool | None) -> None:
    for options in (optimizer.defaults, *optimizer.param_groups):
        options |= {"fused": None, "foreach": foreach}
    optimizer._step_supports_amp_scaling = False


def _patch_fused_optimizer(script: Script, value: str) -> Proposal:
    proposal = set_arguments(
        script,
        "optimizer",
        {"fused": "True"},
        where=_can_be_fused,
        in_libraries={"transformers": _TRAINER},
    )
    # torch refuses both together
    return proposal + set_arguments(
        script,
        "optimizer",
        {"foreach": "None"},
        where=lambda built: _can_be_fused(built) and bool(built.options.get("foreach")),
        positions=_POSITIONS,
        in_libraries={"transformers": _TRAINER},
    )


def _can_be_fused(built: Built) -> bool:
    options = built.options
    return "fused" in options and not options["fused"] and not options.get("differentiable")


FUSED_OPTIMIZER = Fix(
    fits=_why_not_fused_optimizer, apply=_apply_fused_optimizer, patch=_patch_fused_optimizer
)


# Gradients are dropped before a pass instead of filled with zeros: zero_grad(set_to_none=True).
#
# An optimizer skips a parameter whose gradient is None, but updates one whose gradient is zero:
# with momentum or weight decay that is another training. So as soon as a parameter that had a
# gradient gets none, zeros are put there and the change is refused.

_NAME = "zero_grad"


def _why_not_set_to_none(facts: ScriptFacts, value: str) -> str | None:
    if not facts.zero_grad:
        return "no call of zero_grad keeps the memory of gradients"
    return None


def _apply_set_to_none(training: TrainingProcess, value: str) -> None:
    import torch

    switch = _Switch(training)
    switch.replace(torch.optim.Optimizer, "optimizer")
    switch.replace(torch.nn.Module, "module")
    training.before_step(switch.check)


class _Switch:
    """Changes calls of zero_grad until a step shows that they must stay as they are."""

    def __init__(self, training: TrainingProcess) -> None:
        self._tell, self._refuse = training.telling(), training.refusing()
        self._changed = False  # at least one call was
        self._refused = False
        self._had: WeakKeyDictionary[Any, list[bool]] = WeakKeyDictionary()

    def replace(self, owner: Any, kind: str) -> None:
        original = owner.zero_grad

        @functools.wraps(original)
        def zero_grad(self_: Any, set_to_none: bool = True) -> None:
            if not set_to_none and not self._refused:
                set_to_none = self._changed = True
                self._tell(f"{kind}.zero_grad: set_to_none=True")
            original(self_, set_to_none)

        owner.zero_grad = zero_grad

    def check(self, optimizer: Any) -> None:
        """Before each step."""
        if self._refused:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        present = [parameter.grad is not None for parameter in parameters]
        had = self._had.get(optimizer, [])
        self._had[optimizer] = present
        if not self._changed or len(had) != len(present) or had == present:
            return
        self._keep_zeros([p for p, then in zip(parameters, had, strict=True) if then])

    def _keep_zeros(self, parameters: list[Any]) -> None:
        import torch

        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self._refused = True
        if self._refused:
            self._refuse(
                "some parameters get no gradient in some steps. The optimizer updates them "
                "if their gradient is zero, but skips them if it is None"
            )


def _patch_set_to_none(script: Script, value: str) -> Proposal:
    """Every such call in the file where the first one was met."""
    found = script.source_of(script.facts.zero_grad)
    edits = _zero_grad_edits(found[0]) if found is not None else ()
    if edits:
        return Proposal(edits=edits)
    where = f" (called from {script.facts.zero_grad[0].words})" if script.facts.zero_grad else ""
    return Proposal(by_hand=(f"call zero_grad with set_to_none=True{where}",))


def _zero_grad_edits(source: PythonSource) -> tuple[Edit, ...]:
    calls = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    edits = [
        source.set_keyword(call, "set_to_none", "True", 0)
        for call in calls
        if source.called(call) == _NAME and (call.args or call.keywords)
    ]
    return tuple(edit for edit in edits if edit is not None)


SET_TO_NONE = Fix(fits=_why_not_set_to_none, apply=_apply_set_to_none, patch=_patch_set_to_none)
