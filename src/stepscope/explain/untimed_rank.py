"""A rank of which no step, timeline or work is known: a memory snapshot, or a run of which only the
parameter server's events were kept."""

from __future__ import annotations

from typing import Any

from stepscope.explain.empty_part import empty_part
from stepscope.explain.launches import no_launches
from stepscope.records.explanation import Budget, Idle, RankExplanation, Steps, StepTime, Timeline

MEMORY_ONLY, SERVER_ONLY = "memory-only", "server-only"  # the notes that say so
_TABLES = ("kernels", "operators", "modules", "lines", "copies", "syncs", "collectives")


def untimed_rank(**known: Any) -> RankExplanation:
    """`known` has at least path, kind, events, findings and quality, which says what is known."""
    absent: dict[str, Any] = dict.fromkeys(("rank", "world_size", "device", "gaps"))
    empty: dict[str, Any] = dict.fromkeys(_TABLES, ())
    return RankExplanation(
        timeline=Timeline(**dict.fromkeys(Timeline.__struct_fields__, 0)),
        idle=Idle(**dict.fromkeys(Idle.__struct_fields__, 0)),
        steps=Steps(source="window", steps=(), cycles_ns=(), window_start_ns=0, window_end_ns=0),
        step_ms=StepTime(profiled=None),
        budget=Budget(step_ms=0.0, parts=(), basis="window"),
        launches=no_launches(),
        part=empty_part(rank=0),
        strategies=(),
        **absent,
        **empty,
        **known,
    )


def is_untimed(rank: RankExplanation) -> bool:
    """Whether nothing is known about the time of this rank's steps."""
    return any(note.id in (MEMORY_ONLY, SERVER_ONLY) for note in rank.quality)


def is_server_only(rank: RankExplanation) -> bool:
    """Whether only what a parameter server recorded is known."""
    return any(note.id == SERVER_ONLY for note in rank.quality)
