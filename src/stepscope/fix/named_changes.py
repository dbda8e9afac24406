"""Read the changes a user names (ID or ID=VALUE): remedies, and controls that show what
chance alone does to a training. Imports no torch until a change is applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepscope.errors import UsageError
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal
from stepscope.fix.random_states import restore, states_now
from stepscope.fix.remedies import FIXES
from stepscope.records.remedies import FIX_OF, REMEDIES, did_you_mean

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess


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


# Changes that are no remedies: they show what chance alone does to a training.
#
# nudged-weights=PRECISION:N  Before its first forward, every weight of the model is moved by a
# random
#                             share of the size that products of this precision round by.
# other-draws=N               What the model draws in its forward passes, such as dropout, comes
# from
#                             another stream of random numbers. The script's data keep theirs.
#
# `tune` runs the command with them where the losses of a remedy look wrong: what a nudge of the
# size of rounding does, a remedy that rounds otherwise may do too.

NUDGED, REDRAWN = "nudged-weights", "other-draws"
_ROUNDS_BY = {"fp32": 2.0**-24, "tf32": 2.0**-11, "16-bits": 2.0**-9}
_FIRST_SEED = 7919


def nudge_weights(training: TrainingProcess, value: str) -> None:
    """Each root's parameters, once."""
    precision, _, number = value.partition(":")
    share, seed = _ROUNDS_BY[precision], _FIRST_SEED + int(number or 1)
    tell, nudged = training.telling(), set[int]()

    def nudge(root: Any) -> None:
        import torch

        for parameter in root.parameters():
            if id(parameter) in nudged or not parameter.is_floating_point():
                continue
            nudged.add(id(parameter))
            draw = torch.Generator(parameter.device).manual_seed(seed + len(nudged))
            with torch.no_grad():
                noise = torch.empty_like(parameter).uniform_(-share, share, generator=draw)
                parameter.mul_(1 + noise)
        tell("every weight moved by a random amount of the size of rounding")

    training.when_root(nudge)


def draw_others(training: TrainingProcess, value: str) -> None:
    """From the beginning of a root's forward to the beginning of backward."""
    streams = _TwoStreams(_FIRST_SEED + int(value or 1))
    tell = training.telling()

    def switch(*_call: Any) -> None:
        streams.use_other()
        tell("forward passes draw from another stream of random numbers")

    training.around_root(switch)
    training.before_backward(lambda _outputs: streams.use_own())


class _TwoStreams:
    """The random numbers of the script and others, each going on where it was left."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: list[Any] | None = None  # set aside while the others are used
        self._other: list[Any] | None = None

    def use_other(self) -> None:
        import torch

        if self._own is not None:
            return
        self._own = states_now()
        if self._other is None:
            torch.manual_seed(self._seed)
        else:
            restore(self._other)

    def use_own(self) -> None:
        if self._own is not None:
            self._other = states_now()
            restore(self._own)
            self._own = None


CONTROLS = {
    control.id: control
    for control in (
        Fix(
            id=NUDGED,
            effect=Effect.ROUNDING,
            fits=lambda _facts, _value: None,
            patch=lambda _script, _value: Proposal(),
            apply=nudge_weights,
            values=("fp32:1",),
        ),
        Fix(
            id=REDRAWN,
            effect=Effect.RANDOM,
            fits=lambda _facts, _value: None,
            patch=lambda _script, _value: Proposal(),
            apply=draw_others,
            values=("1",),
        ),
    )
}
