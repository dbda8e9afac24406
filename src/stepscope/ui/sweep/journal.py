"""trials.jsonl: what a sweep has finished, one line each, so that a killed one can go on.

A line that was cut short is thrown away; its trial runs again, as do those that were training.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.records.encode_json import encode_json
from stepscope.trace.regular_files import open_to_append, read_whole

if TYPE_CHECKING:
    from pathlib import Path

JOURNAL, BEST = "trials.jsonl", "best.pt"
_MOST_BYTES = 1 << 30


class SweepStart(msgspec.Struct, frozen=True, kw_only=True, tag="start", tag_field="kind"):
    """What was asked for: the first line."""

    script: str
    grid: dict[str, list[Any]]
    steps: int
    fuse: int | None  # None: as many as fit
    every: int
    seed: int
    schema: int = 1


class EndedTrial(msgspec.Struct, frozen=True, kw_only=True, tag="trial", tag_field="kind"):
    """One setting that has ended."""

    number: int  # its place in the grid
    config: dict[str, Any]
    state: Literal["finished", "stopped", "failed"]
    steps: int
    losses: list[float]  # the mean of every few steps
    loss: float | None  # the last of them; None: not finite, or none
    why: str | None = None  # it failed or was stopped


_LINE = msgspec.json.Decoder(SweepStart | EndedTrial)


class SweepJournal:
    """In the sweep's folder."""

    def __init__(self, folder: Path, start: SweepStart, ended: list[EndedTrial]) -> None:
        self.folder, self.start, self.ended = folder, start, ended

    @classmethod
    def create(cls, folder: Path, start: SweepStart) -> SweepJournal:
        journal = cls(folder, start, [])
        journal._append(start)
        return journal

    @classmethod
    def read(cls, folder: Path) -> SweepJournal:
        """UnreadableInputError if it is none; UsageError without a first line."""
        text = read_whole(folder / JOURNAL, _MOST_BYTES)
        lines = text.split(b"\n")
        whole, cut = lines[:-1], lines[-1]
        try:
            records = [_LINE.decode(line) for line in whole]
        except msgspec.MsgspecError as error:
            raise UnreadableInputError(
                f"{folder / JOURNAL} is not the journal of a sweep: {error}"
            ) from None
        if not records or not isinstance(records[0], SweepStart):
            raise UsageError(f"{folder} holds no sweep to resume: start a new one without --resume")
        if cut:
            _cut(folder / JOURNAL, len(text) - len(cut))
        ended = [record for record in records[1:] if isinstance(record, EndedTrial)]
        return cls(folder, records[0], ended)

    def add(self, trial: EndedTrial) -> None:
        self._append(trial)
        self.ended.append(trial)

    def best(self) -> EndedTrial | None:
        """The finished one with the lowest loss."""
        return min(filter(_has_result, self.ended), key=_loss, default=None)

    def is_better(self, trial: EndedTrial) -> bool:
        """Than all that are in it."""
        best = self.best()
        return _has_result(trial) and (best is None or _loss(trial) < _loss(best))

    def _append(self, record: msgspec.Struct) -> None:
        descriptor = open_to_append(self.folder / JOURNAL)
        try:
            os.write(descriptor, encode_json(record) + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _has_result(trial: EndedTrial) -> bool:
    return trial.state == "finished" and trial.loss is not None


def _loss(trial: EndedTrial) -> float:
    return math.inf if trial.loss is None else trial.loss


def _cut(path: Path, size: int) -> None:
    descriptor = open_to_append(path)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
