"""Gradients are dropped before a pass instead of filled with zeros: zero_grad(set_to_none=True).

An optimizer skips a parameter whose gradient is None, but updates one whose gradient is zero: with
momentum or weight decay that is another training. So as soon as a parameter that had a gradient
gets none, zeros are put there and the remedy is refused.
"""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.python_source import Edit, PythonSource
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

_NAME = "zero_grad"


def fits(facts: ScriptFacts, value: str) -> str | None:
    if not facts.zero_grad:
        return "no call of zero_grad keeps the memory of gradients"
    return None


def apply(training: TrainingProcess, value: str) -> None:
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


def patch(script: Script, value: str) -> Proposal:
    """Every such call in the file where the first one was met."""
    found = script.source_of(script.facts.zero_grad)
    edits = _edits(found[0]) if found is not None else ()
    if edits:
        return Proposal(edits=edits)
    where = f" (called from {script.facts.zero_grad[0].words})" if script.facts.zero_grad else ""
    return Proposal(by_hand=(f"call zero_grad with set_to_none=True{where}",))


def _edits(source: PythonSource) -> tuple[Edit, ...]:
    calls = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    edits = [
        source.set_keyword(call, "set_to_none", "True", 0)
        for call in calls
        if source.called(call) == _NAME and (call.args or call.keywords)
    ]
    return tuple(edit for edit in edits if edit is not None)


FIX = Fix(id="set-to-none", effect=Effect.BIT_IDENTICAL, fits=fits, apply=apply, patch=patch)
