"""Read the changes that a user names: ID or ID=VALUE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.errors import UsageError
from stepscope.fix.controls import CONTROLS
from stepscope.fix.remedies import FIXES
from stepscope.records.remedies import REMEDIES
from stepscope.records.same_change import FIX_OF, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stepscope.fix.declaration import Fix


@dataclass(frozen=True, slots=True)
class ChosenFix:
    """One change and its value."""

    remedy: Fix
    value: str = ""

    def __str__(self) -> str:
        return f"{self.remedy.id}={self.value}" if self.value else self.remedy.id

    @property
    def family(self) -> str:
        return self.remedy.family or self.remedy.id


def choose(text: str) -> ChosenFix:
    """Read ID or ID=VALUE, or the same change as `whatif --set` spells it.

    Raises UsageError for a name that nothing has, and for a value that the change does not take.
    """
    text = text.strip()
    name, _, value = text.partition("=")
    known = CONTROLS.get(name) or FIXES.get(name)
    if text in FIX_OF and (known is None or not _takes(known, value)):
        return choose(FIX_OF[text])
    if known is None:
        raise UsageError(_why_unknown(text, name))
    takes_value = known.values != ("",) or known.values_of is not None
    if value and not takes_value:
        raise UsageError(f"{text}: {name} takes no value. Write {name} alone")
    if takes_value and not value and "" not in known.values:
        value = known.values[0]
    if value and not _takes(known, value):
        tried = ", ".join(f"{name}={value}" for value in known.values if value)
        such = f". Values such as {tried} work" if tried else ""
        raise UsageError(f"{text}: {name} does not take the value {value!r}{such}")
    return ChosenFix(known, value)


def _takes(fix: Fix, value: str) -> bool:
    return fix.accepts is None or not value or fix.accepts(value)


def _why_unknown(text: str, name: str) -> str:
    if name in REMEDIES:
        return (
            f"stepscope cannot apply the change {name!r} for you: make it in the script, then "
            "compare both versions with `stepscope ab`"
        )
    hint = did_you_mean(text, [*FIXES, *FIX_OF])
    known = f". There are {', '.join(sorted(FIXES))}"
    return f"there is no change {text!r} that stepscope can apply{hint or known}"


def choose_all(texts: Iterable[str]) -> tuple[ChosenFix, ...]:
    """Read several changes that are applied together; only one of a family may be among them."""
    chosen = tuple(choose(text) for text in texts)
    check_together(chosen)
    return chosen


def check_together(chosen: Sequence[ChosenFix]) -> None:
    """Raise UsageError if two of them cannot be applied at once."""
    families: dict[str, ChosenFix] = {}
    for one in chosen:
        other = families.setdefault(one.family, one)
        if other is not one:
            raise UsageError(f"{other} and {one} cannot be applied together. Choose one")


def environment(chosen: Iterable[ChosenFix], variables: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables to set before the command starts; None means unset."""
    changes: dict[str, str | None] = {}
    for one in chosen:
        if one.remedy.environment is not None:
            present = with_changes(variables, changes)
            changes |= one.remedy.environment(one.value, present)
    return changes


def with_changes(variables: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the variables after some were set and others unset."""
    return {name: value for name, value in {**variables, **changes}.items() if value is not None}
