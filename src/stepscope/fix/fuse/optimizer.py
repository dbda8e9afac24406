"""One optimizer for all models of an array, each with settings of its own that are copied to
the device when they change.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from stepscope.errors import UsageError
from stepscope.fix.fuse.behaviours import (
    StepGuard,
    check_optimizers,
    hooks_made,
    state_before,
    steps_in_its_own_way,
)
from stepscope.fix.fuse.kernel_choice import proven_kernels
from stepscope.fix.fuse.updates import (
    KERNELS,
    UPDATES,
    WeightStep,
    can_step,
    step_each,
    step_together,
)

if TYPE_CHECKING:
    Values = list[Any]

# The user's optimizers, one for each model, stay where settings are kept: schedulers change them
# there, and they are read before every step. The update itself is computed for all models at once
# (updates.py), or by each optimizer itself where its kind is not known here.

State = dict[str, torch.Tensor]
_COUNT = "step"  # in a state: each model's own, where they differ from weight to weight


class StackedModels(Protocol):
    """An array: its stacks by name, its models by number."""

    def get_parameter(self, name: str) -> torch.Tensor: ...

    def without_gradient(self) -> dict[str, list[bool]]: ...

    def __getitem__(self, model: int) -> Any: ...


class ArrayOptimizer:
    """Steps every model of the array."""

    def __init__(self, array: StackedModels, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        kinds = {type(optimizer) for optimizer in optimizers}
        if len(kinds) > 1:
            names = sorted(kind.__name__ for kind in kinds)
            raise UsageError(f"all fused models need one kind of optimizer, not {names}")
        check_optimizers(optimizers)
        self._array, self._kind = array, kinds.pop()
        plain = not any(group.get("differentiable") for group in optimizers[0].param_groups)
        self._update = UPDATES.get(self._kind) if plain else None
        self._groups = _group_of_each(array, optimizers)
        if any(array.get_parameter(name).is_complex() for name in self._groups):
            self._update = None  # torch updates real and imaginary parts as two weights
        self._sizes = _group_sizes(optimizers)
        self._hooks_seen = -1
        self._guard = StepGuard(optimizers, self._write_state, self._read_states)
        self._states: dict[str, State] = {name: {} for name in self._groups}
        device = next(array.get_parameter(name).device for name in self._groups)
        self._columns = SettingColumns(self.optimizers, device)
        self._counts = torch.zeros(len(optimizers), dtype=torch.float64, device=device)
        self._same_count = True
        self.use_kernels = device.type == "cuda"  # torch's own; updates.py where they cannot

    @property
    def is_fused(self) -> bool:
        self._follow()
        return self._update is not None

    def step(self, skipped: Sequence[bool] | None = None) -> None:
        """`skipped` models stay as they are: their gradients overflowed."""
        self._follow()
        if self._update is None:
            self._step_each(skipped)
            return
        self.prepare()
        some = bool(skipped) and any(skipped or ())
        going = torch.tensor([not one for one in skipped or ()]) if some else None
        left_out = self._array.without_gradient()
        with torch.no_grad():
            for group, names in self._names_by_group().items():
                own = [name for name in names if name in left_out or _COUNT in self._states[name]]
                for name in own:
                    self._step_by_own_count(group, name, going, left_out.get(name))
                rest = [name for name in names if name not in own]
                if rest and going is not None:
                    going = going.to(self._counts.device)
                    self._step_some(group, rest, going, self._counts + going)
                elif rest:
                    self._step_group(self._weight_step(group, rest), group)
            self._count_apart_what_waits()
            if going is not None:
                self._same_count = False
            self._counts += 1 if going is None else going.to(self._counts.device)

    def leave(self) -> None:
        """The optimizers are their models' own again."""
        self._guard.leave()

    def go_on_as(self, former: ArrayOptimizer) -> None:
        self._columns.as_columns = former._columns.as_columns
        self.use_kernels = former.use_kernels

    def adopt(self) -> None:
        """Go on from what the optimizers have done before they came into the array."""
        if self._update is None or not any(optimizer.state for optimizer in self.optimizers):
            return
        models = [dict(self._array[place].named_parameters()) for place in self._places()]
        for name in self._groups:
            own = [model[name.replace("/", ".")] for model in models]
            former = zip(self.optimizers, own, strict=True)
            stack = self._array.get_parameter(name)
            states = [one.state.get(weight, {}) for one, weight in former]
            self._states[name] = state_before(states, stack)
        counts = [one.get(_COUNT) for one in self._states.values()]
        first = counts[0]
        if first is not None and all(one is not None and torch.equal(one, first) for one in counts):
            self._counts.copy_(first)
            for state in self._states.values():
                del state[_COUNT]
        else:
            self._states = {
                name: state or {_COUNT: torch.zeros_like(self._counts)}
                for name, state in self._states.items()
            }
        self._same_count = len(set(self._counts.tolist())) < 2

    def _read_states(self, model: int) -> None:
        """The user has loaded a state into one model's own optimizer."""
        for place in self._places():
            if place != model:
                self._write_state(place)
        self.adopt()

    def _places(self) -> range:
        return range(len(self.optimizers))

    def _follow(self) -> None:
        """Notice what the user changed: groups of weights, and hooks that an own step calls."""
        sizes = _group_sizes(self.optimizers)
        if sizes != self._sizes:
            self._groups, self._sizes = _group_of_each(self._array, self.optimizers), sizes
            for name in self._groups:
                if name not in self._states:
                    self._states[name] = {_COUNT: torch.zeros_like(self._counts)}
        if self._update is None or hooks_made() == self._hooks_seen:
            return
        self._hooks_seen = hooks_made()
        if any(map(steps_in_its_own_way, self.optimizers)):
            for model in self._places():
                self._write_state(model)
            self._states = {name: {} for name in self._groups}
            self._update = None

    def prepare(self) -> None:
        """All that a step needs from the host: settings, copied to the device if they changed."""
        for optimizer in self.optimizers:
            optimizer._opt_called = True  # schedulers ask for it
        self._columns.refresh()

    def hold_on_device(self) -> None:
        """From now on a step reads every number from the device, as a captured step must."""
        self._columns.as_columns = True

    def held(self) -> tuple[Any, ...]:
        """Return what a captured step cannot change: it is captured again when this changes."""
        numbers: tuple[Any, ...] = ()
        if self.use_kernels and self._kind in KERNELS:
            numbers = tuple(
                tuple(self._columns.values_of(group, name))
                for group, name in self._columns.numbers()
                if name != "lr"
            )
        return self._columns.signature(), numbers

    def _names_by_group(self) -> dict[int, list[str]]:
        """Stacks that have a gradient."""
        names: dict[int, list[str]] = {}
        for name, group in self._groups.items():
            if self._array.get_parameter(name).grad is not None:
                names.setdefault(group, []).append(name)
        return names

    def _weight_step(self, group: int, names: list[str]) -> WeightStep:
        stacks = [self._array.get_parameter(name) for name in names]
        gradients: Any = [stack.grad for stack in stacks]
        settings = self._columns.of(group)
        used = {name for name in settings if self._columns.is_used(group, name)}
        states = [self._states[name] for name in names]
        return WeightStep(stacks, gradients, states, settings, used, self._counts + 1)

    def _step_group(self, step: WeightStep, group: int) -> None:
        assert self._update is not None
        if not self.use_kernels or not can_step(self._kind, step):
            self._update(step)
            return
        columns = self._columns
        if columns.agree(group) and self._same_count:
            step_together(self._kind, step, self._settings_of(0, group, step))
            return
        own = proven_kernels("adam_kernel", step.weights[0])
        if own is not None and own.can_step(self._kind, step):
            own.step_all(self._kind, step)
            return
        models = range(len(self.optimizers))
        step_each(self._kind, step, [self._settings_of(model, group, step) for model in models])

    def _settings_of(self, model: int, group: int, step: WeightStep) -> dict[str, Any]:
        """One model's, as numbers; a captured step has its rate on the device."""
        own = {name: self._columns.values_of(group, name)[model] for name in step.settings}
        if self._columns.as_columns:
            own["lr"] = step.settings["lr"][model].float()
        return own

    def _count_apart_what_waits(self) -> None:
        """Weights that have no gradient in this step: they are behind the others from now on."""
        for name, state in self._states.items():
            if self._array.get_parameter(name).grad is None:
                state.setdefault(_COUNT, self._counts.clone())

    def _step_by_own_count(
        self, group: int, name: str, going: torch.Tensor | None, left_out: list[bool] | None
    ) -> None:
        """A weight that some model left out in some step: each counts its own steps of it."""
        count = self._states[name].setdefault(_COUNT, self._counts.clone())
        if going is None and left_out is None:
            count += 1
            assert self._update is not None
            self._update(self._weight_step(group, [name])._replace(count=count))
            return
        active = torch.ones(len(self.optimizers), dtype=torch.bool)
        if left_out is not None:
            active &= ~torch.tensor(left_out)
        if going is not None:
            active &= going.cpu()
        active = active.to(count.device)
        count += active
        self._step_some(group, [name], active, count)

    def _step_some(
        self, group: int, names: list[str], going: torch.Tensor, count: torch.Tensor
    ) -> None:
        """All are computed; those that stay get their old values back."""
        step = self._weight_step(group, names)
        masks = [going.reshape(-1, *(1,) * (one.dim() - 1)) for one in step.weights]
        old = [stack.detach().clone() for stack in step.weights]
        before = [{name: value.clone() for name, value in state.items()} for state in step.states]
        gradients = [
            torch.where(mask, one, 0) for mask, one in zip(masks, step.gradients, strict=True)
        ]
        assert self._update is not None
        self._update(step._replace(gradients=gradients, count=count.clamp(min=1)))
        for place, mask in enumerate(masks):
            stack, state = step.weights[place], step.states[place]
            stack.copy_(torch.where(mask, stack, old[place]))
            for name, value in state.items():
                if name != _COUNT:
                    former = before[place].get(name)
                    value.copy_(torch.where(mask, value, 0 if former is None else former))

    def _step_each(self, skipped: Sequence[bool] | None) -> None:
        left_out = self._array.without_gradient()
        for number, optimizer in enumerate(self.optimizers):
            if skipped and skipped[number]:
                continue
            model = self._array[number]
            own = {name: model.get_parameter(name.replace("/", ".")) for name in self._groups}
            for name, weight in own.items():
                gradient = self._array.get_parameter(name).grad
                absent = gradient is None or (name in left_out and left_out[name][number])
                weight.grad = None if absent or gradient is None else gradient[number]
            with self._guard.allowed():
                optimizer.step()
            for weight in own.values():
                weight.grad = None

    def checkpoint(self) -> dict[str, Any]:
        """Copies of all states and settings."""
        states, steps = self.states_of(self._places())
        own = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]
        return {"states": states, "steps": steps, "own": own}

    def resume(self, saved: dict[str, Any]) -> None:
        with self._guard.allowed():
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
        return (*self.states_of(self._places()), own)

    def put_back(self, copies: tuple[dict[str, State], list[int], list[dict[Any, Any]]]) -> None:
        """Go back to what `copies` gave, once."""
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
        places = self._places()[chosen] if isinstance(chosen, slice) else chosen
        return states, [int(self._counts[model]) for model in places]

    def restore(self, states: tuple[dict[str, State], list[int]]) -> None:
        """Models beyond those are new: their state is empty."""
        known, steps = states
        missing = len(self.optimizers) - len(steps)
        counts = torch.tensor([*steps, *[0] * missing], dtype=torch.float64)
        self._counts.copy_(counts)
        self._same_count = len(set(counts.tolist())) < 2
        for name, state in known.items():
            if name not in self._states:
                continue  # the models have lost this weight
            for kind, value in state.items():
                room = value.new_zeros((missing, *value.shape[1:]))
                self._states[name][kind] = torch.cat([value, room]) if missing else value
        for name in self._states.keys() - known.keys():  # weights that the models have by now
            self._states[name] = {_COUNT: torch.zeros_like(self._counts)}

    def export(self, model: int) -> dict[str, Any]:
        """The model's own optimizer, with the state that it would have had alone."""
        whole: dict[str, Any] = self.optimizers[model].state_dict()
        return whole

    def _write_state(self, model: int) -> None:
        """Before the user, or `export`, asks a model's own optimizer for its state."""
        if self._update is None:
            return
        optimizer, own = self.optimizers[model], dict(self._array[model].named_parameters())
        for name, state in self._states.items():
            if not state.keys() - {_COUNT}:
                continue
            parts = {kind: value[model].clone() for kind, value in state.items()}
            count = parts.pop(_COUNT, self._counts[model])
            if type(optimizer) is not torch.optim.SGD:
                parts["step"] = count.cpu().float()
            optimizer.state[own[name.replace("/", ".")]] = parts


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
    for number, optimizer in enumerate(optimizers):
        steps = {id(own) for content in optimizer.param_groups for own in content["params"]}
        for name, own in array[number].named_parameters():
            if id(own) not in steps and name.replace(".", "/") in groups:
                raise UsageError(
                    f"optimizer {number} does not step {name}, but another model's optimizer "
                    "does. Give all optimizers the same weights"
                )
    return groups


def _group_sizes(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[int]]:
    return [[len(group["params"]) for group in one.param_groups] for one in optimizers]


# Every model's settings on the device: copied there when one of them changed, and only then.
#
# The user's optimizers keep the settings, and schedulers change them there. One copy from pinned
# memory brings all of them over, so that a step reads nothing from the host.

_LISTS = {"betas": ("beta1", "beta2")}  # settings that hold several numbers, and the names of those


class SettingColumns:
    """Settings by group of parameters and name: one value where all models agree, else a column."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        self._optimizers, self._device = optimizers, device
        self._values: list[dict[str, Values]] = []
        self._numbers: list[list[float]] = []
        self._places: dict[tuple[int, str], int] = {}
        self._columns: torch.Tensor | None = None
        self.as_columns = False  # every number: a captured step must not hold one of the host's

    def refresh(self) -> None:
        """Read the optimizers; copy to the device if a number changed."""
        self._values = [
            _by_name([optimizer.param_groups[group] for optimizer in self._optimizers])
            for group in range(len(self._optimizers[0].param_groups))
        ]
        self._places = {}
        numbers: list[list[float]] = []
        for group, settings in enumerate(self._values):
            for name, values in settings.items():
                if _is_number(values[0]):
                    self._places[group, name] = len(numbers)
                    numbers.append([float(value) for value in values])
        if numbers != self._numbers:
            self._numbers = numbers
            self._copy(torch.tensor(numbers, dtype=torch.float64))

    def of(self, group: int) -> dict[str, Any]:
        """Return values by name, or columns [models] of the device."""
        return {name: self._setting(group, name) for name in self._values[group]}

    def values_of(self, group: int, name: str) -> Values:
        """Every model's, as the host knows them."""
        return self._values[group][name]

    def numbers(self) -> list[tuple[int, str]]:
        """Group and name of each setting that is a number."""
        return list(self._places)

    def agree(self, group: int) -> bool:
        return all(_all_equal(values) for values in self._values[group].values())

    def is_used(self, group: int, name: str) -> bool:
        """Whether the setting is other than zero for some model."""
        return any(self._values[group].get(name, ()))

    def signature(self) -> tuple[Any, ...]:
        """Return what a captured step cannot change: settings in use, and those without number."""
        return tuple(
            (name, *values) if not _is_number(values[0]) else (name, any(values))
            for settings in self._values
            for name, values in settings.items()
        )

    def _setting(self, group: int, name: str) -> Any:
        values, place = self._values[group][name], self._places.get((group, name))
        agreed = _all_equal(values)
        if place is not None and (self.as_columns or not agreed):
            assert self._columns is not None
            return self._columns[place]
        if not agreed:
            raise UsageError(f"fused models cannot differ in a setting such as {values[0]!r}")
        return float(values[0]) if place is not None else values[0]

    def _copy(self, numbers: torch.Tensor) -> None:
        if self._device.type == "cuda":
            numbers = numbers.pin_memory()  # torch keeps it until the copy is done
        if self._columns is None or self._columns.shape != numbers.shape:
            self._columns = torch.empty_like(numbers, device=self._device)
        self._columns.copy_(numbers, non_blocking=True)


def _by_name(groups: list[dict[str, Any]]) -> dict[str, Values]:
    named: dict[str, Values] = {}
    for name in groups[0]:
        if name in ("params", "param_names") or any(name not in group for group in groups):
            continue  # a scheduler leaves notes of its own in some groups
        values = [group[name] for group in groups]
        for place, part in enumerate(_LISTS.get(name, ())):
            named[part] = [value[place] for value in values]
        if name not in _LISTS:
            named[name] = values
    return named


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.numel() == 1)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _all_equal(values: Values) -> bool:
    first = values[0]
    return not any(value != first for value in values)
