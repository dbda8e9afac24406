"""Remedies as a user names them: ID or ID=VALUE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.errors import UsageError
from stepscope.fix.controls import CONTROLS
from stepscope.fix.remedies import FIXES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stepscope.fix.declaration import Fix


@dataclass(frozen=True, slots=True)
class ChosenFix:
    """A remedy and its value."""

    remedy: Fix
    value: str = ""

    def __str__(self) -> str:
        return f"{self.remedy.id}={self.value}" if self.value else self.remedy.id

    @property
    def family(self) -> str:
        return self.remedy.family or self.remedy.id


def choose(text: str) -> ChosenFix:
    """UsageError for an id that nothing has, or a value it does not take."""
    name, _, value = text.strip().partition("=")
    if name not in FIXES and name not in CONTROLS:
        from difflib import get_close_matches

        near = get_close_matches(name, list(FIXES), 1)
        hint = f", did you mean {near[0]}?" if near else ";"
        raise UsageError(
            f"there is no remedy {name!r} that can be applied{hint} there are "
            f"{', '.join(sorted(FIXES))}"
        )
    remedy = CONTROLS[name] if name in CONTROLS else FIXES[name]
    takes_value = remedy.values != ("",) or remedy.values_of is not None
    if value and not takes_value:
        raise UsageError(f"{text}: {name} takes no value")
    if takes_value and not value and "" not in remedy.values:
        value = remedy.values[0]
    if value and remedy.accepts is not None and not remedy.accepts(value):
        tried = ", ".join(f"{name}={value}" for value in remedy.values if value)
        such = f"; it takes values such as {tried}" if tried else ""
        raise UsageError(f"{text}: {name} does not take {value!r}{such}")
    return ChosenFix(remedy, value)


def choose_all(texts: Iterable[str]) -> tuple[ChosenFix, ...]:
    """Several together: of a family only one."""
    chosen = tuple(choose(text) for text in texts)
    check_together(chosen)
    return chosen


def check_together(chosen: Sequence[ChosenFix]) -> None:
    """UsageError if two of them cannot be applied at once."""
    families: dict[str, ChosenFix] = {}
    for one in chosen:
        other = families.setdefault(one.family, one)
        if other is not one:
            raise UsageError(f"{other} and {one} cannot be applied together: choose one")


def environment(chosen: Iterable[ChosenFix], variables: Mapping[str, str]) -> dict[str, str | None]:
    """What must be set before the command starts, given the user's variables; None: unset."""
    changes: dict[str, str | None] = {}
    for one in chosen:
        if one.remedy.environment is not None:
            present = with_changes(variables, changes)
            changes |= one.remedy.environment(one.value, present)
    return changes


def with_changes(variables: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Variables after some were set and others unset."""
    return {name: value for name, value in {**variables, **changes}.items() if value is not None}
