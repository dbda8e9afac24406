"""A rank's list of steps on disk: steps.jsonl, and the packed parts that hold its older steps.

A packed part is one gzip file of JSON: for each field a list with one number per step. Fields of
lines that lack them are ABSENT. Three fields are stored as what the others do not already say:
`step` as the distance to the previous step, `other_ns` as what the phases leave of the wall time,
`end_unix_ns` as the time since the previous end that is no part of this step. Wall times are exact;
a few parts of them lose digits that no measurement has (ROUNDED). Both ends of the program, capture
and readers, take names and fields from here.
"""

from __future__ import annotations

import re

TAIL = "steps.jsonl"
SCHEMA = 1
ABSENT = -1
STEP, WALL, OTHER, END = "step", "wall_ns", "other_ns", "end_unix_ns"
# Without `other_ns`: that is what these leave of the wall time.
PHASE_FIELDS = (
    "data_ns",
    "forward_ns",
    "backward_ns",
    "optimizer_ns",
    "evaluation_ns",
    "checkpoint_ns",
    "gc_ns",
    "compile_ns",
    "between_epochs_ns",
)
USUAL_FIELDS = (*PHASE_FIELDS[:4], OTHER)  # on every line
EXTRA_FIELDS = (
    "epoch_gap_ns",
    "device_ns",
    "elements",
    "allocated_bytes",
    "cpu_wait_ns",
    "major_faults",
    "retries",
    "graphs",
)
# Rounded down to a power of ten of at most 1 / ROUNDING of the step; `other_ns` gets the rest, so
# that phases still add up.
ROUNDED = frozenset((*PHASE_FIELDS[:4], "device_ns", "cpu_wait_ns"))
ROUNDING = 100_000
MARKS = ("window", "first", "last", "memory", "skipped", "host")
_PART = re.compile(r"steps-(\d{5})\.json\.gz")


def part_name(number: int) -> str:
    """Parts count from 1."""
    return f"steps-{number:05d}.json.gz"


def part_number(name: str) -> int | None:
    """None for a file that is no packed part."""
    match = _PART.fullmatch(name)
    return int(match[1]) if match else None
