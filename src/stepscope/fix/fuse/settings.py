"""Every model's settings on the device: copied there when one of them changed, and only then.

The user's optimizers keep the settings, and schedulers change them there. One copy from pinned
memory brings all of them over, so that a step reads nothing from the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    Values = list[Any]  # one for each model

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
        """By name: a value, or a column [models] of the device."""
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
        """What a captured step cannot change: which settings are used, and those without number."""
        return tuple(
            (name, *values) if not _is_number(values[0]) else (name, any(values))
            for settings in self._values
            for name, values in settings.items()
        )

    def _setting(self, group: int, name: str) -> Any:
        values = self._values[group][name]
        place = self._places.get((group, name))
        if place is not None and (self.as_columns or not _all_equal(values)):
            assert self._columns is not None
            return self._columns[place]
        if not _all_equal(values):
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
