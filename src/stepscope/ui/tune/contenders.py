"""What a search knows of each remedy, and the tests it makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stepscope.fix.chosen import ChosenFix
    from stepscope.ui.tune.journal import PlannedRemedy
    from stepscope.ui.tune.rules import CheckedTrial
    from stepscope.ui.tune.trial_run import TrialRun
    from stepscope.verify.tuned_gain import Gain, GainVerdict, Screening

Configuration = tuple[str, ...]
BASELINE: Configuration = ()
FEWEST_TOGETHER = 2
OUT_OF_TIME = "the budget was spent before the result was certain"


@dataclass(slots=True, kw_only=True)
class Contender:
    """One remedy with its value, and what is known of it so far."""

    planned: PlannedRemedy
    chosen: ChosenFix
    alone: TrialRun | None = None
    screening: Screening | None = None
    checked: CheckedTrial | None = None  # what its numbers and its memory show
    out: str | None = None  # why it cannot be kept, whatever its pace
    tested_on: set[Configuration] = field(default_factory=set)

    @property
    def name(self) -> str:
        return str(self.chosen)

    @property
    def gain(self) -> float:
        return self.screening.gain.value if self.screening else 0.0

    @property
    def is_promising(self) -> bool:
        return self.out is None and self.screening is not None and self.screening.promising

    @property
    def is_open(self) -> bool:
        """It may still help together with others: alone it was not clearly worse."""
        return self.out is None and self.screening is not None and self.screening.gain.high >= 0


@dataclass(slots=True, kw_only=True)
class PairTest:
    """Fresh pairs of a base and the same with more remedies, or another one of a family."""

    base: Configuration
    challenger: Configuration
    pairs: list[tuple[TrialRun, TrialRun]] = field(default_factory=list)
    verdict: GainVerdict | None = None
    checked: CheckedTrial | None = None
    why: str = OUT_OF_TIME
    kept: bool = False
    is_for: str = ""  # the member of a combination that must earn its place by this test

    @property
    def gain(self) -> Gain | None:
        return self.verdict.gain if self.verdict else None

    @property
    def is_unsure(self) -> bool:
        """Starts of one command differ by as much as there is to gain."""
        return self.verdict is not None and self.verdict.starts_differ is not None


class Rescreened(NamedTuple):
    """One run of what was kept at the time with one remedy more, exchanged or left out."""

    base: Configuration
    screening: Screening
    checked: CheckedTrial | None = None
