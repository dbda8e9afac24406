"""Read the changes a user names (ID or ID=VALUE): those of the list, and controls that show what
chance alone does to a training. Imports no torch until a change is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stepscope.changes import APPLIED, APPLIED_AS, CHANGES, did_you_mean
from stepscope.changes.change import Application, Change, Code, Effect
from stepscope.errors import UsageError
from stepscope.fix.declaration import Fix
from stepscope.fix.proposal import Proposal
from stepscope.fix.random_states import restore, states_now

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts


@dataclass(frozen=True, slots=True)
class ChosenChange:
    """One change with its value, and the part that makes it."""

    change: Change
    fix: Fix
    value: str = ""

    def __str__(self) -> str:
        return f"{self.id}={self.value}" if self.value else self.id

    @property
    def id(self) -> str:
        return self.change.id

    @property
    def application(self) -> Application:
        assert self.change.application is not None
        return self.change.application

    @property
    def family(self) -> str:
        return self.application.family or self.id

    def values_for(self, facts: ScriptFacts) -> tuple[str, ...]:
        """Return what to try on this script, one at a time."""
        return self.fix.values_of(facts) if self.fix.values_of else self.application.values

    def takes(self, value: str) -> bool:
        return self.fix.accepts is None or not value or self.fix.accepts(value)


def load_change(name: str) -> ChosenChange:
    """Import what makes a change of the list; it has no value yet."""
    fix: Fix = APPLIED[name].part.load()
    return ChosenChange(CHANGES[name], fix)


def applied_changes() -> Iterator[ChosenChange]:
    """Yield every change that can be applied, in the order in which they are listed and tried."""
    return map(load_change, APPLIED)


def choose(text: str) -> ChosenChange:
    """Read ID or ID=VALUE, or the same change as `whatif --set` spells it.

    Raises UsageError for a name that nothing has, and for a value that the change does not take.
    """
    text = text.strip()
    name, _, value = text.partition("=")
    chosen = CONTROLS.get(name) or (load_change(name) if name in APPLIED else None)
    if text in APPLIED_AS and (chosen is None or not chosen.takes(value)):
        return choose(APPLIED_AS[text])
    if chosen is None:
        raise UsageError(_why_unknown(text, name))
    application = chosen.application
    if value and not application.takes_value:
        raise UsageError(f"{text}: {name} takes no value. Write {name} alone")
    if not value and application.values:
        value = application.values[0]
    if not chosen.takes(value):
        tried = ", ".join(f"{name}={value}" for value in application.values if value)
        such = f". Values such as {tried} work" if tried else ""
        raise UsageError(f"{text}: {name} does not take the value {value!r}{such}")
    return replace(chosen, value=value)


def _why_unknown(text: str, name: str) -> str:
    if name in CHANGES and CHANGES[name].action:
        return CHANGES[name].why_not_applied()
    hint = did_you_mean(text, [*APPLIED, *reversed(APPLIED_AS)])
    listed = f". There are {', '.join(sorted(APPLIED))}"
    return f"there is no change {text!r} that stepscope can apply{hint or listed}"


def choose_all(texts: Iterable[str]) -> tuple[ChosenChange, ...]:
    """Read several changes that are applied together; only one of a family may be among them."""
    chosen = tuple(choose(text) for text in texts)
    check_together(chosen)
    return chosen


def check_together(changes: Sequence[ChosenChange]) -> None:
    """Raise UsageError if two of them cannot be applied at once."""
    families: dict[str, ChosenChange] = {}
    for change in changes:
        first = families.setdefault(change.family, change)
        if first is not change:
            raise UsageError(f"{first} and {change} cannot be applied together. Choose one")


def environment(
    chosen: Iterable[ChosenChange], variables: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the variables to set before the command starts; None means unset."""
    changes: dict[str, str | None] = {}
    for change in chosen:
        if change.fix.environment is not None:
            present = with_changes(variables, changes)
            changes |= change.fix.environment(change.value, present)
    return changes


def with_changes(variables: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the variables after some were set and others unset."""
    return {name: value for name, value in {**variables, **changes}.items() if value is not None}


# Changes that nobody would want: they show what chance alone does to a training.
#
# nudged-weights=PRECISION:N  Before its first forward, every weight of the model is moved by a
#                             random share of the size that matmuls of this precision round by.
# other-draws=N               What the model draws in its forward passes, such as dropout, comes
#                             from another stream of random numbers. The script's data keep theirs.
#
# `tune` runs the command with them where the losses of a change look wrong: what a nudge of the
# size of rounding does, a change that rounds otherwise may do too.

NUDGED, REDRAWN = "nudged-weights", "other-draws"
_ROUNDS_BY = {"fp32": 2.0**-24, "tf32": 2.0**-11, "16-bits": 2.0**-9}
_FIRST_SEED = 7919


def nudge_weights(training: TrainingProcess, value: str) -> None:
    """Nudge each root's parameters, once."""
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
    """Use other random numbers from the beginning of a root's forward to that of backward.

    Both streams go on where they were left.
    """
    tell = training.telling()
    scripts: list[Any] = []  # the script's states, set aside while the others are used
    others: list[Any] = []

    def use_others(*_call: Any) -> None:
        import torch

        if not scripts:
            scripts[:] = states_now()
            if others:
                restore(others)
            else:
                torch.manual_seed(_FIRST_SEED + int(value or 1))
        tell("forward passes draw from another stream of random numbers")

    def use_the_scripts(_outputs: Any) -> None:
        if scripts:
            others[:] = states_now()
            restore(scripts)
            scripts.clear()

    training.around_root(use_others)
    training.before_backward(use_the_scripts)


def _control(
    name: str, effect: Effect, value: str, apply: Callable[[TrainingProcess, str], None]
) -> ChosenChange:
    application = Application(Code("fix.named_changes:CONTROLS"), effect, values=(value,))
    fix = Fix(
        fits=lambda _facts, _value: None, patch=lambda _script, _value: Proposal(), apply=apply
    )
    return ChosenChange(Change(name, application=application), fix)


CONTROLS = {
    NUDGED: _control(NUDGED, Effect.ROUNDING, "fp32:1", nudge_weights),
    REDRAWN: _control(REDRAWN, Effect.RANDOM, "1", draw_others),
}
