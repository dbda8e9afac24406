"""Choose which remedies are tried on this training, in which order, and why the others are
not; keep what is finished in journal.jsonl, so that a killed tune can go on.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.changes.change import Effect
from stepscope.errors import UnreadableInputError, UsageError
from stepscope.fix.named_changes import ChosenChange, applied_changes, choose
from stepscope.records.prediction import Setting
from stepscope.trace.files import list_folder, may_exist
from stepscope.trace.run_folder.related_runs import BASELINE, JOURNAL, TRIALS
from stepscope.ui.json_text import append_line, read_journal

if TYPE_CHECKING:
    from stepscope.records.script_facts import ScriptFacts

EFFECT_WORDS = {
    Effect.BIT_IDENTICAL: "changes no number",
    Effect.ROUNDING: "rounds differently",
    Effect.RANDOM: "draws other random numbers",
    Effect.TRAINING: "changes the training",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingRemedies:
    """What fits a training: what is tried, what only a patch can do, and what is left out."""

    candidates: tuple[ChosenChange, ...]
    late: tuple[ChosenChange, ...]  # they may fit once another one is kept
    proposals: tuple[ChosenChange, ...]
    left_out: tuple[LeftOut, ...]  # `late` ones too: nothing may be kept


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRemedies:
    """--only, --skip and --allow. Without --only everything is wanted that may save time."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    allow: Effect = Effect.ROUNDING
    saves_memory: bool = False  # what saves memory and costs time is wanted too

    @classmethod
    def parse(
        cls, only: Sequence[str], skip: Sequence[str], allow: str, *, saves_memory: bool = False
    ) -> WantedRemedies:
        """UsageError for an id that nothing has."""
        only = [_own_spelling(text) for text in only]
        skip = [_own_spelling(text) for text in skip]
        if both := set(only) & set(skip):
            raise UsageError(f"{min(both)} is in both --only and --skip")
        return cls(
            only=tuple(only), skip=tuple(skip), allow=Effect(allow), saves_memory=saves_memory
        )

    def wants(self, chosen: ChosenChange) -> bool:
        return (not self.only or _named(chosen, self.only)) and not _named(chosen, self.skip)

    def listed(self, facts: ScriptFacts) -> Iterable[ChosenChange]:
        """Every remedy and value that is wanted on this script, in declared order."""
        for change in applied_changes():
            asked = [
                text.partition("=")[2]
                for text in self.only
                if text.partition("=")[0] == change.id and "=" in text
            ]
            values = dict.fromkeys((*change.values_for(facts), *asked))
            yield from filter(self.wants, (replace(change, value=value) for value in values))


def _own_spelling(text: str) -> str:
    """Return a name as tune prints it: a name without a value stays so, and means all values."""
    chosen = choose(text)
    return chosen.id if text.strip() == chosen.id else str(chosen)


def _named(chosen: ChosenChange, texts: Iterable[str]) -> bool:
    """By its id, which means all of its values, or with its value."""
    return any(text in (chosen.id, str(chosen)) for text in texts)


def fitting_remedies(facts: ScriptFacts, wanted: WantedRemedies) -> FittingRemedies:
    candidates, late, proposals, left_out = [], [], [], []
    for chosen in wanted.listed(facts):
        why = _why_not(chosen, facts, wanted)
        if why is not None:
            left_out.append(LeftOut(remedy=str(chosen), why=why))
            if chosen.application.after and _is_allowed(chosen, wanted.allow):
                late.append(chosen)
        elif chosen.application.patch_only:
            proposals.append(chosen)
        else:
            candidates.append(chosen)
    return FittingRemedies(
        candidates=tuple(candidates),
        late=tuple(late),
        proposals=tuple(proposals),
        left_out=tuple(_joined(left_out)),
    )


def _why_not(chosen: ChosenChange, facts: ScriptFacts, wanted: WantedRemedies) -> str | None:
    """A remedy's own mistake is no reason to fail: it is left out and says so."""
    try:
        why = chosen.fix.fits(facts, chosen.value)
    except Exception as error:
        return f"a defect in stepscope: {type(error).__name__}: {error}"
    if why is not None:
        return why
    if chosen.application.saves == "memory" and not wanted.saves_memory and not wanted.only:
        return "it saves memory and costs time. --memory-limit or --only tries it"
    if not _is_allowed(chosen, wanted.allow):
        effect = chosen.application.effect
        return f"it {EFFECT_WORDS[effect]}. --allow {effect} tries it"
    return None


def _is_allowed(chosen: ChosenChange, allowed: Effect) -> bool:
    """One that may do less than its worst is tried: its losses show what it did."""
    return (chosen.application.may_be or chosen.application.effect).level <= allowed.level


def _joined(left_out: Iterable[LeftOut]) -> list[LeftOut]:
    """Values of one remedy that are left out for one reason are named once."""
    rows: dict[tuple[str, str], LeftOut] = {}
    for row in left_out:
        name = row.remedy.partition("=")[0]
        known = (name, row.why) in rows
        rows[name, row.why] = LeftOut(remedy=name, why=row.why) if known else row
    return list(rows.values())


def in_order(
    candidates: Sequence[ChosenChange],
    predicted: Mapping[str, PlannedRemedy],
    leading: Sequence[str] = (),
) -> tuple[PlannedRemedy, ...]:
    """Remedies of the `leading` finding first. Then the largest predicted gain, with the best value
    of each remedy; then those without a prediction as they are declared, other values, and last
    what is predicted not to help."""
    planned = [predicted.get(str(one)) or PlannedRemedy(remedy=str(one)) for one in candidates]
    best: dict[str, float] = {}
    for row in planned:
        if row.predicted_ms is not None:
            name = row.remedy.partition("=")[0]
            best[name] = min(row.predicted_ms, best.get(name, row.predicted_ms))

    def place(row: PlannedRemedy) -> tuple[bool, int, float]:
        name = row.remedy.partition("=")[0]
        later = name not in leading or row.hopeless
        if row.predicted_ms is None:
            return later, 1, 0.0
        if row.hopeless:
            return later, 3, row.predicted_ms
        return later, (0 if row.predicted_ms == best[name] else 2), row.predicted_ms

    return tuple(sorted(planned, key=place))  # stable: declared order among equals


# journal.jsonl: what a tune has finished, one line each, so that a killed one can go on.
#
# A line is written to the disk before anything that follows from it happens. A last line that was
# cut short, and a trial's folder without a line, are thrown away when the tune is resumed.

SCHEMA = 1
_MOST_BYTES = 256 << 20


class TuneStart(msgspec.Struct, frozen=True, kw_only=True, tag="start", tag_field="kind"):
    """What was asked for: the first line."""

    command: tuple[str, ...]
    folder: str  # the working folder
    steps: int
    budget_s: float
    allow: str
    step_on: str = "auto"
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    memory_limit: int | None = None
    stepscope: str = ""
    started_unix: float = 0.0
    schema: int = SCHEMA


class PlannedRemedy(msgspec.Struct, frozen=True, kw_only=True):
    """One remedy that will be tried, with what was predicted for it."""

    remedy: str
    setting: Setting | None = None  # the what-if that predicts it
    predicted_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    promise: str | None = None  # its id in the track record
    hopeless: bool = False  # predicted to be slower, or to make no difference


class PlannedCombination(msgspec.Struct, frozen=True, kw_only=True):
    """Remedies that are predicted to do far more together than the best of them alone."""

    remedies: tuple[str, ...]  # the one that gives most first
    predicted_ms: float
    low_ms: float
    high_ms: float


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A remedy that is not tried, and why."""

    remedy: str
    why: str


class TunePlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan", tag_field="kind"):
    """What the baseline's capture led to: the second line."""

    candidates: tuple[PlannedRemedy, ...]
    left_out: tuple[LeftOut, ...]
    late: tuple[str, ...]  # remedies that may fit once another one is kept
    proposals: tuple[str, ...]  # remedies that fit and that only a patch can make
    baseline_ms: float | None  # as the predictions see it
    took_s: float
    limit_s: float  # of one trial
    least_steps: int  # of a command that ends by itself
    together: PlannedCombination | None = None


class FinishedTrial(msgspec.Struct, frozen=True, kw_only=True, tag="trial", tag_field="kind"):
    """One trial that has ended; its folder holds the rest."""

    number: int
    remedies: tuple[str, ...]
    folder: str
    took_s: float
    failed: str | None = None
    output: tuple[str, ...] = ()


JournalLine = TuneStart | TunePlan | FinishedTrial
_LINES: msgspec.json.Decoder[JournalLine] = msgspec.json.Decoder(JournalLine)


class Journal:
    """Reads what an earlier tune left, and appends to it."""

    def __init__(self, folder: Path, lines: Iterable[JournalLine]) -> None:
        self.folder = folder
        self.plan: TunePlan | None = None
        self.trials: list[FinishedTrial] = []
        start: TuneStart | None = None
        for line in lines:
            match line:
                case TuneStart():
                    start = line
                case TunePlan():
                    self.plan = line
                case FinishedTrial():
                    self.trials.append(line)
        if start is None:
            raise UsageError(f"{folder / JOURNAL} has no first line: start a new tune")
        self.start = start

    @classmethod
    def create(cls, folder: Path, start: TuneStart) -> Journal:
        """OSError if it cannot be written."""
        journal = cls(folder, [start])
        append_line(folder / JOURNAL, start)
        (folder / TRIALS).mkdir()
        return journal

    @classmethod
    def resume(cls, folder: Path) -> Journal:
        """Throw away what is half-written, and read the rest."""
        path = folder / JOURNAL
        if not may_exist(path):
            raise UsageError(
                f"--resume {folder}: it holds no {JOURNAL}, so no tune was started there"
            )
        lines = read_journal(path, _MOST_BYTES)
        try:
            journal = cls(folder, map(_LINES.decode, lines))
        except msgspec.DecodeError as error:
            raise UnreadableInputError(f"{path} cannot be read: {error}") from None
        journal._throw_away_unfinished()
        return journal

    def add(self, line: TunePlan | FinishedTrial) -> None:
        append_line(self.folder / JOURNAL, line)
        if isinstance(line, TunePlan):
            self.plan = line
        else:
            self.trials.append(line)

    @property
    def next_number(self) -> int:
        return max((trial.number for trial in self.trials), default=0) + 1

    def _throw_away_unfinished(self) -> None:
        home = self.folder / TRIALS
        home.mkdir(exist_ok=True)
        finished = {trial.folder for trial in self.trials}
        for place in list_folder(home):
            if place.name not in finished:
                shutil.rmtree(place, ignore_errors=True)
        if self.plan is None:
            shutil.rmtree(self.folder / BASELINE, ignore_errors=True)
