"""What a remedy declares about itself: each file in remedies/ holds one such record, `FIX`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.fix.proposal import Proposal, Script
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts

    Apply = Callable[[TrainingProcess, str], None]
    Fits = Callable[[ScriptFacts, str], str | None]
    Patch = Callable[[Script, str], Proposal]
    Environment = Callable[[str, Mapping[str, str]], dict[str, str | None]]
    ValuesOf = Callable[[ScriptFacts], tuple[str, ...]]


class Effect(StrEnum):
    """What a remedy does to the numbers, from nothing to everything."""

    BIT_IDENTICAL = "bit-identical"
    ROUNDING = "rounding"  # the same up to rounding
    RANDOM = "random"  # other random numbers are drawn
    TRAINING = "training"  # another training: it may converge otherwise

    @property
    def level(self) -> int:
        return list(Effect).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One thing that can be changed without touching the script.

    `fits(facts, value)` says why it cannot help here, or None. `apply(training, value)` runs in the
    training process, once torch is imported and before the script has built anything.
    `environment(value, variables)` gives what must be set before Python starts, where `variables`
    are the user's own: a variable of None is unset. Asked again with the result it gives the same.
    `patch(script, value)` is the edit a person would make instead, and trains exactly the same.

    `effect` is the worst that the remedy can do to the numbers. Some do less to most scripts:
    workers of a DataLoader draw other random numbers, but only if the dataset draws any. Such a
    remedy says so with `may_be`, the least it does. `tune` then tries it if `may_be` is allowed,
    even if `effect` is not, and decides by what the losses show. It is kept
    - if the losses show no more than what is allowed: they stayed bit-identical, say; or
    - if the effect is `random` and the baseline against itself differs just as much: a script
      without a fixed seed draws other random numbers in every run anyway.
    Otherwise it is shown as found and not kept, with the `--allow` that would keep it.

    A remedy in `after` may fit only once another is kept: prefetch-factor needs workers. So `fits`
    is asked again with the facts of the trial that was kept.
    """

    id: str
    effect: Effect
    fits: Fits
    patch: Patch
    apply: Apply | None = None
    environment: Environment | None = None
    values: tuple[str, ...] = ("",)  # what `tune` tries, one at a time; "" means it takes none
    values_of: ValuesOf | None = None  # the same where they follow from the script
    family: str = ""  # of a family only one is applied at a time
    may_be: Effect | None = None  # the least it does, where that depends on the script
    accepts: Callable[[str], bool] | None = None  # which values a user may give; None: any
    after: frozenset[str] = frozenset()  # tried again once one of these families is kept
    saves: str = "time"  # "memory": it costs time, so `tune` tries it only where memory is short

    def values_for(self, facts: ScriptFacts) -> tuple[str, ...]:
        """What to try on this script, one at a time."""
        return self.values_of(facts) if self.values_of is not None else self.values

    @property
    def is_proposal(self) -> bool:
        """Nothing of it can be injected: there is only the patch."""
        return self.apply is None and self.environment is None
