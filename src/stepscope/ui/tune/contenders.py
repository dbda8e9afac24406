"""What a search knows of each remedy, the tests it makes, and what rules a trial out,
however fast it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.changes.change import Effect
from stepscope.fix.named_changes import NUDGED, REDRAWN, ChosenChange
from stepscope.records.script_facts import ScriptFacts
from stepscope.ui.tune.plan import EFFECT_WORDS, PlannedRemedy
from stepscope.verify.parity import Parity, check_parity, coarsest_precision
from stepscope.verify.trials import Loss, compare_peaks, losses_of

if TYPE_CHECKING:
    from stepscope.ui.tune.trials import TrialRun
    from stepscope.verify.tuned_gain import Gain, GainVerdict, Screening

Configuration = tuple[str, ...]
BASELINE: Configuration = ()
FEWEST_TOGETHER = 2
OUT_OF_TIME = "the budget was spent before the result was certain"


@dataclass(slots=True, kw_only=True)
class Contender:
    """One remedy with its value, and what is known of it so far."""

    planned: PlannedRemedy
    chosen: ChosenChange
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


# What rules a trial out, however fast it is: other numbers than allowed, or too much memory.

_CONTROLS = 4  # runs of the command as it is that losses are compared with
_LEVELS = {effect.value: effect.level for effect in Effect}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTrial:
    """What the losses and the memory of a trial show."""

    parity: str
    detail: str
    peak_bytes: int | None
    why_out: str | None
    control: str | None = None  # what might explain its losses: run the command as it is with it


@dataclass(slots=True)
class Controls:
    """Runs of the command as it is in which chance alone was changed, by what was changed."""

    runs: dict[str, list[TrialRun]] = field(default_factory=dict)

    def losses(self, kind: str) -> list[Any]:
        return [losses_of(trial.ranks) for trial in self.runs.get(kind, ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRules:
    """What the user allows."""

    allow: Effect = Effect.ROUNDING
    memory_limit: int | None = None  # bytes of one rank

    def look(
        self,
        bases: Sequence[TrialRun],
        trial: TrialRun,
        members: Sequence[ChosenChange],
        controls: Controls,
    ) -> CheckedTrial:
        """`bases` are runs of the command as it is; `members` are the remedies applied."""
        declared = max((member.application.effect for member in members), key=lambda one: one.level)
        facts = bases[0].facts or ScriptFacts()
        precision = coarsest_precision(facts, trial.remedies)
        nudged = f"{NUDGED}={precision.replace(' ', '-')}"
        parity = check_parity(
            [losses_of(base.ranks) for base in bases[:_CONTROLS]],
            [losses_of(trial.ranks)],
            declared=declared.value,
            precision=precision,
            nudged=controls.losses(nudged),
            redrawn=controls.losses(REDRAWN),
        )
        why = self._why_numbers(parity, declared)
        peak = compare_peaks([base.ranks for base in bases], [trial.ranks], self.memory_limit)
        return CheckedTrial(
            parity=parity.parity,
            detail=parity.why,
            peak_bytes=peak.peak_bytes,
            why_out=why or peak.refused,
            control=_control_wanted(parity, declared, nudged, controls) if why else None,
        )

    def _why_numbers(self, parity: Parity, declared: Effect) -> str | None:
        """A script that draws other random numbers in every run loses nothing if a remedy does."""
        if parity.parity == "failed":
            return f"its losses differ from those of the unchanged command: {parity.why}"
        observed = _LEVELS.get(parity.observed)
        if observed is None:  # what is not known cannot be better than what was declared
            observed = declared.level
        allowed = max(self.allow.level, _LEVELS.get(parity.control, 0))
        if observed <= allowed:
            return None
        effect = list(Effect)[observed]
        return f"it {EFFECT_WORDS[effect]}; --allow {effect} keeps it"


def _control_wanted(
    parity: Parity, declared: Effect, nudged: str, controls: Controls
) -> str | None:
    """Rounding first; other random numbers only where the remedy may draw others."""
    if parity.observed not in ("random", "training") or declared == Effect.BIT_IDENTICAL:
        return None
    wanted = [nudged, REDRAWN] if declared.level >= Effect.RANDOM.level else [nudged]
    return next((kind for kind in wanted if kind not in controls.runs), None)


def control_words(bases: Sequence[TrialRun], memory_limit: int | None = None) -> str:
    """Say how runs of the unchanged command ended: their losses, and the memory limit."""
    words = [_losses_words(bases)]
    refused = compare_peaks([], [base.ranks for base in bases], memory_limit).refused
    if refused is not None:
        words.append(f"the unchanged command breaks the memory limit: {refused}")
    return "; ".join(filter(None, words))


def _losses_words(bases: Sequence[TrialRun]) -> str:
    losses = [losses_of(base.ranks) for base in bases]
    if len(losses) < 2 or not losses[0]:
        return "no loss was captured" if losses and not losses[0] else ""
    if all(_repeats(losses[0], other) for other in losses[1:]):
        return "its losses are bit-identical from run to run"
    return "its own losses differ from run to run"


def _repeats(first: Mapping[int, Sequence[Loss]], second: Mapping[int, Sequence[Loss]]) -> bool:
    """Whether both have the same losses as far as both went: trials end at different steps."""
    if first.keys() != second.keys():
        return False
    pairs = (zip(first[rank], second[rank], strict=False) for rank in first)
    return all(one == other for pair in pairs for one, other in pair)


def peak_bytes(trials: Sequence[TrialRun]) -> int | None:
    """The most that a rank had: on the device where there is one, else on the host."""
    return compare_peaks([], [trial.ranks for trial in trials]).peak_bytes
