"""memory.json, and bytes per step in steps.jsonl: what capture wrote about a rank's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.records.memory import CapturedMemory
from stepscope.records.quality import Note
from stepscope.trace.rank_folder import MEMORY
from stepscope.trace.truth import STEPS

if TYPE_CHECKING:
    from pathlib import Path


class _Row(msgspec.Struct, frozen=True):
    step: int
    allocated_bytes: int | None = None


def read_captured(folder: Path) -> CapturedMemory | Note | None:
    """None where memory was not captured; a note where the file cannot be read."""
    try:
        return msgspec.json.decode((folder / MEMORY).read_bytes(), type=CapturedMemory)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        return Note(id="memory-unreadable", detail=f"{MEMORY} could not be read: {error}")


def read_step_bytes(folder: Path) -> tuple[tuple[int, int], ...]:
    """(step, bytes allocated at its end) of every step that was written with it."""
    try:
        lines = (folder / STEPS).read_bytes().splitlines()
    except OSError:
        return ()
    rows = [row for line in lines if (row := _row(line)) is not None]
    return tuple((row.step, row.allocated_bytes) for row in rows if row.allocated_bytes is not None)


def _row(line: bytes) -> _Row | None:
    try:
        return msgspec.json.decode(line, type=_Row)
    except msgspec.DecodeError:
        return None
