"""What a remedy declares about itself: each file in remedies/ holds one such record, `FIX`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.fix.proposal import Proposal, Script
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts

    Apply = Callable[[TrainingProcess, str], None]
    Fits = Callable[[ScriptFacts, str], str | None]
    Patch = Callable[[Script, str], Proposal]
    Environment = Callable[[str], dict[str, str]]


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
    training process, once torch is imported and before the script has built anything; what must
    be set before Python starts goes into `environment(value)`. `patch(script, value)` is the edit
    a person would make instead, and trains exactly the same.
    """

    id: str
    effect: Effect
    fits: Fits
    patch: Patch
    apply: Apply | None = None
    environment: Environment | None = None
    values: tuple[str, ...] = ("",)  # what `tune` tries, one at a time; "" means it takes none
    family: str = ""  # of a family only one is applied at a time
    after: frozenset[str] = frozenset()  # tried again once one of these families is kept
    saves: str = "time"  # "memory": it costs time, so `tune` tries it only where memory is short

    @property
    def is_proposal(self) -> bool:
        """Nothing of it can be injected: there is only the patch."""
        return self.apply is None and self.environment is None
