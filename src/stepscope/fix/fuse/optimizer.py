"""One optimizer for all models of an array, each with settings of its own.

The user's optimizers, one for each model, stay where settings are kept: schedulers change them
there, and they are read before every step. The update itself is computed for all models at once
(updates.py), or by each optimizer itself where its kind is not known here.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Protocol

import torch

from stepscope.errors import UsageError
from stepscope.fix.fuse.updates import UPDATES, WeightStep

if TYPE_CHECKING:
    from collections.abc import Sequence

State = dict[str, torch.Tensor]


class StackedModels(Protocol):
    """An array: its stacks by name, its models by number."""

    def get_parameter(self, name: str) -> torch.Tensor: ...

    def __getitem__(self, model: int) -> Any: ...


class ArrayOptimizer:
    """Steps every model of the array."""

    def __init__(self, array: StackedModels, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        kinds = {type(optimizer) for optimizer in optimizers}
        if len(kinds) > 1:
            names = sorted(kind.__name__ for kind in kinds)
            raise UsageError(f"all models of an array need one kind of optimizer, not {names}")
        self._array = array
        self._update = UPDATES.get(kinds.pop())
        self._groups = _group_of_each(array, optimizers)
        self._states: dict[str, State] = {name: {} for name in self._groups}
        self._steps = [0] * len(optimizers)

    @property
    def is_fused(self) -> bool:
        return self._update is not None

    def step(self, skipped: Sequence[bool] | None = None) -> None:
        """`skipped` models stay as they are: their gradients overflowed."""
        if self._update is None:
            self._step_each(skipped)
            return
        for optimizer in self.optimizers:
            optimizer._opt_called = True  # schedulers ask for it
        active = [not one for one in skipped] if skipped else [True] * len(self.optimizers)
        self._steps = [step + on for step, on in zip(self._steps, active, strict=True)]
        for name, group in self._groups.items():
            stack: Any = self._array.get_parameter(name)
            if stack.grad is None:
                continue
            settings = self._settings(group, stack)
            state = self._states[name]
            with torch.no_grad():
                if all(active):
                    self._update(
                        WeightStep(stack, stack.grad, state, settings, self._counts(stack))
                    )
                else:
                    self._update_some(stack, state, settings, active)

    def _update_some(self, stack: Any, state: State, settings: Any, active: list[bool]) -> None:
        """All are computed; those that skip get their old values back."""
        keep = torch.tensor(active, device=stack.device).reshape(-1, *(1,) * (stack.dim() - 1))
        before = {name: value.clone() for name, value in state.items()}
        old, gradient = stack.detach().clone(), torch.where(keep, stack.grad, 0)
        assert self._update is not None
        counts = self._counts(stack).clamp(min=1)
        self._update(WeightStep(stack, gradient, state, settings, counts))
        stack.copy_(torch.where(keep, stack, old))
        for name, value in state.items():
            former = before.get(name)
            value.copy_(torch.where(keep, value, 0 if former is None else former))

    def _settings(self, group: int, stack: torch.Tensor) -> dict[str, Any]:
        """By name: one value where all models agree, else a column of theirs."""
        groups = [optimizer.param_groups[group] for optimizer in self.optimizers]
        return {
            name: _column([one[name] for one in groups], stack)
            for name in groups[0]
            if name != "params"
        }

    def _counts(self, stack: torch.Tensor) -> torch.Tensor:
        """Each model's number of steps, as a column."""
        counts = torch.tensor(self._steps, dtype=torch.float64, device=stack.device)
        return counts.reshape(-1, *(1,) * (stack.dim() - 1))

    def _step_each(self, skipped: Sequence[bool] | None) -> None:
        for number, optimizer in enumerate(self.optimizers):
            if skipped and skipped[number]:
                continue
            model = self._array[number]
            for name, own in model.named_parameters():
                stack = self._array.get_parameter(name.replace(".", "/"))
                own.grad = None if stack.grad is None else stack.grad[number]
            optimizer.step()

    def checkpoint(self) -> dict[str, Any]:
        """Copies of all states and settings."""
        states, steps = self.states_of(range(len(self.optimizers)))
        own = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]
        return {"states": states, "steps": steps, "own": own}

    def resume(self, saved: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, saved["own"], strict=True):
            optimizer.load_state_dict(state)
        states = {
            name: {kind: value.clone() for kind, value in state.items()}
            for name, state in saved["states"].items()
        }
        self._states = {name: {} for name in self._groups}
        self.restore((states, list(saved["steps"])))

    def copies(self) -> tuple[dict[str, State], list[int], list[dict[Any, Any]]]:
        """All states, to go back to exactly: loading a state dict would change dtypes."""
        own = [
            {weight: copy.deepcopy(state) for weight, state in optimizer.state.items()}
            for optimizer in self.optimizers
        ]
        return (*self.states_of(range(len(self.optimizers))), own)

    def put_back(self, copies: tuple[dict[str, State], list[int], list[dict[Any, Any]]]) -> None:
        """What `copies` gave, once."""
        states, steps, own = copies
        self._states = {name: {} for name in self._groups}
        self.restore((states, steps))
        for optimizer, state in zip(self.optimizers, own, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)

    # The states, when models come and go.

    def states_of(self, models: Sequence[int] | slice) -> tuple[dict[str, State], list[int]]:
        """Copies; of a slice, windows."""
        chosen = models if isinstance(models, slice) else list(models)
        states = {
            name: {kind: value[chosen] for kind, value in state.items()}
            for name, state in self._states.items()
        }
        places = range(len(self._steps))[chosen] if isinstance(chosen, slice) else chosen
        return states, [self._steps[model] for model in places]

    def restore(self, states: tuple[dict[str, State], list[int]]) -> None:
        """Models beyond those are new: their state is empty."""
        known, steps = states
        missing = len(self.optimizers) - len(steps)
        self._steps = steps + [0] * missing
        for name, state in known.items():
            for kind, value in state.items():
                room = value.new_zeros((missing, *value.shape[1:]))
                self._states[name][kind] = torch.cat([value, room]) if missing else value

    def export(self, model: int) -> dict[str, Any]:
        """The model's own optimizer, with the state that it would have had alone."""
        optimizer = self.optimizers[model]
        if self._update is not None:
            own = dict(self._array[model].named_parameters())
            for name, state in self._states.items():
                if not state:
                    continue
                parts = {kind: value[model].clone() for kind, value in state.items()}
                if type(optimizer) is not torch.optim.SGD:
                    parts["step"] = torch.tensor(float(self._steps[model]))
                optimizer.state[own[name.replace("/", ".")]] = parts
        whole: dict[str, Any] = optimizer.state_dict()
        return whole


def _group_of_each(
    array: StackedModels, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, int]:
    """Stack -> the number of its parameter group, the same for every model."""
    groups: dict[str, int] = {}
    for number, optimizer in enumerate(optimizers):
        names = {id(own): name for name, own in array[number].named_parameters()}
        for group, content in enumerate(optimizer.param_groups):
            for own in content["params"]:
                if id(own) not in names:
                    raise UsageError(
                        f"optimizer {number} has a parameter that is not model {number}'s"
                    )
                name = names[id(own)].replace(".", "/")
                if groups.setdefault(name, group) != group:
                    raise UsageError(f"{names[id(own)]} is in other groups of optimizer {number}")
    return groups


def _column(values: list[Any], stack: torch.Tensor) -> Any:
    first = values[0]
    if all(value == first for value in values):
        return first
    if isinstance(first, tuple | list):
        return tuple(_column(list(parts), stack) for parts in zip(*values, strict=True))
    if isinstance(first, bool) or not isinstance(first, int | float):
        raise UsageError(f"models of an array cannot differ in a setting such as {first!r}")
    column = torch.tensor([float(value) for value in values], dtype=torch.float64)
    column = column.to(stack.device, torch.promote_types(stack.dtype, torch.float32))
    return column.reshape(-1, *(1,) * (stack.dim() - 1))
