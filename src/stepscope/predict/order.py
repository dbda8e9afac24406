"""In which order changes are made to a step, whatever order they were asked for in.

A what-if reads the trace beside the graph: what removes or shortens comes first, while both still
agree; then what prices operators by their shapes; then what repeats or grows tasks as they have
become; a CUDA graph, which leaves one call and no phases, comes last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.records.prediction import Setting

_FIRST = ("remove", "scale", "no-data-wait", "no-sync")
_THEN = ("threads", "precision", "optimizer", "compile", "batch", "checkpoint", "accumulate")
# What workers tell one another comes behind what each of them computes, and is planned as a whole.
_TOGETHER = ("workers", "zero", "bucket-mb", "bandwidth", "latency", "no-straggler")
_LAST = ("cuda-graphs",)
# These leave the peak of memory as it is; of any other that does not tell one, it is not known.
SAME_PEAK = frozenset(
    (
        "accumulate",
        "bandwidth",
        "bucket-mb",
        "latency",
        "no-data-wait",
        "no-straggler",
        "no-sync",
        "optimizer",
        "threads",
        "workers",
    )
)
# These are priced by what the trace holds, not by what calibration measured.
WITHOUT_CEILINGS = frozenset(
    ("compile", "cuda-graphs", "no-data-wait", "no-straggler", "no-sync", "remove", "scale")
)


def in_order(settings: Iterable[Setting]) -> list[Setting]:
    """The same settings, the first to make first; of one name, by their values."""
    return sorted(settings, key=lambda setting: (_place(setting.name), setting.value))


def _place(name: str) -> int:
    known = {each: place for place, each in enumerate((*_FIRST, *_THEN, *_TOGETHER))}
    return known.get(name, len(known) + (name in _LAST))
