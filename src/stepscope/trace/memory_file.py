"""memory.json: what capture wrote about a rank's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from msgspec.structs import replace

from stepscope.records.memory import CATEGORIES, CapturedMemory
from stepscope.records.saved_memory import FILE, SavedMemory
from stepscope.trace.decode import Oddities, brief
from stepscope.trace.rank_folder import MEMORY
from stepscope.trace.side_files import read_record

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.memory import CapturedPeak, Categories
    from stepscope.records.quality import Note


def read_captured(folder: Path) -> tuple[CapturedMemory | None, tuple[Note, ...]]:
    """None where memory was not captured; notes about what could not be read."""
    oddities = Oddities(MEMORY)
    captured = read_record(folder / MEMORY, CapturedMemory, oddities)
    if captured is not None:
        captured = replace(
            captured,
            peak=_add_up(captured.peak, oddities) if captured.peak else None,
            categories=_known(captured.categories, "categories", oddities),
            phases=[
                replace(end, categories=_known(end.categories, end.phase, oddities))
                for end in captured.phases
            ],
        )
        if oddities.count or (captured.graph and not captured.graph.is_sound):
            captured = replace(captured, graph=None)  # its rows name each other by their numbers
    notes = tuple(
        replace(note, id="memory-unreadable") if note.id == "side-file-unreadable" else note
        for note in oddities.notes
    )
    return captured, notes


def read_saving(folder: Path) -> tuple[SavedMemory | None, tuple[Note, ...]]:
    """What `save_memory` left; None where it did not run."""
    oddities = Oddities(FILE)
    saving = read_record(folder / FILE, SavedMemory, oddities)
    if saving is not None and saving.timeline is not None and not saving.timeline.is_whole():
        oddities.add("timeline", "its lines are not equally long")
        saving = replace(saving, timeline=None)
    return saving, tuple(oddities.notes)


def read_memory(folder: Path) -> dict[str, Any] | None:
    """memory.json of a rank's folder in its own words; None where it was not captured."""
    captured, _ = read_captured(folder)
    return None if captured is None else to_builtins(replace(captured, graph=None))


def _known(categories: Categories, place: str, oddities: Oddities) -> Categories:
    """Without names that are no category."""
    for name in categories.keys() - set(CATEGORIES):
        oddities.add(f"{place}.{brief(name)}", "no such category")
    return {name: categories[name] for name in CATEGORIES if name in categories}


def _add_up(peak: CapturedPeak, oddities: Oddities) -> CapturedPeak:
    """Categories that all are known add up to what the allocator held at the peak. They may hold
    more: what did not come from the allocator, and then nothing is left for the last two."""
    held = _known(peak.categories, "peak", oddities)
    sizes = [held.get(name) for name in CATEGORIES]
    known = [size for size in sizes if size is not None]
    total, allocated = sum(known), peak.allocated_bytes
    if allocated is not None and len(known) == len(sizes):
        rest = (held["temporaries"] or 0) + (held["other"] or 0)
        if total < allocated or (total > allocated and rest):
            oddities.add("peak.categories", f"they sum to {total} bytes of {allocated} allocated")
            held = {}
    return replace(peak, categories=held)
