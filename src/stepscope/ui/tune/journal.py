"""journal.jsonl: what a tune has finished, one line each, so that a killed one can go on.

A line is written to the disk before anything that follows from it happens. A last line that was cut
short, and a trial's folder without a line, are thrown away when the tune is resumed.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.records.encode_json import encode_json
from stepscope.records.prediction import Setting  # noqa: TC001  (decoded at run time)
from stepscope.trace.regular_files import list_folder, may_exist, open_to_append, read_whole
from stepscope.trace.tune_files import BASELINE, JOURNAL, TRIALS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

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
        journal._write(start)
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
        text = read_whole(path, _MOST_BYTES)
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.truncate(path, len(whole))
        try:
            journal = cls(folder, map(_LINES.decode, whole.splitlines()))
        except msgspec.DecodeError as error:
            raise UnreadableInputError(f"{path} cannot be read: {error}") from None
        journal._throw_away_unfinished()
        return journal

    def add(self, line: TunePlan | FinishedTrial) -> None:
        self._write(line)
        if isinstance(line, TunePlan):
            self.plan = line
        else:
            self.trials.append(line)

    @property
    def next_number(self) -> int:
        return max((trial.number for trial in self.trials), default=0) + 1

    def _write(self, line: JournalLine) -> None:
        handle = open_to_append(self.folder / JOURNAL)
        try:
            os.write(handle, encode_json(line) + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)

    def _throw_away_unfinished(self) -> None:
        home = self.folder / TRIALS
        home.mkdir(exist_ok=True)
        finished = {trial.folder for trial in self.trials}
        for place in list_folder(home):
            if place.name not in finished:
                shutil.rmtree(place, ignore_errors=True)
        if self.plan is None:
            shutil.rmtree(self.folder / BASELINE, ignore_errors=True)
