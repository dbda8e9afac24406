"""A CUDA memory snapshot as a rank of which only memory is known: no step, no timeline, no work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.errors import UsageError
from stepscope.explain.findings import (
    fragmentation,
    healthy,
    memory_leak,
    memory_near_limit,
    sort_findings,
)
from stepscope.explain.memory.words import biggest, held_words
from stepscope.records import remedies
from stepscope.records.explanation import (
    Budget,
    Finding,
    Idle,
    Launches,
    RankExplanation,
    Steps,
    StepTime,
    Timeline,
)
from stepscope.records.figures import size
from stepscope.records.job import CollectiveCalls, RankPart, RankSteps
from stepscope.records.quality import Note

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.records.memory import Memory


def explain_snapshot(path: Path, name: str, limit_bytes: int | None) -> RankExplanation:
    """`path` is where the file can be read, `name` what the user calls it."""
    from stepscope.explain.memory.snapshot import memory_of_snapshot
    from stepscope.trace.snapshot import read_snapshot

    snapshot = read_snapshot(path)
    memory, contradictions = memory_of_snapshot(snapshot, limit_bytes)
    return RankExplanation(
        path=name,
        rank=None,
        world_size=None,
        device=None,
        kind="cuda",
        events=sum(len(history) for history in snapshot.histories),
        timeline=Timeline(**dict.fromkeys(Timeline.__struct_fields__, 0)),
        idle=Idle(**dict.fromkeys(Idle.__struct_fields__, 0)),
        gaps=None,
        steps=Steps(source="window", steps=(), cycles_ns=(), window_start_ns=0, window_end_ns=0),
        step_ms=StepTime(profiled=None),
        budget=Budget(step_ms=0.0, parts=(), basis="window"),
        kernels=(),
        operators=(),
        modules=(),
        lines=(),
        launches=_no_launches(),
        copies=(),
        syncs=(),
        collectives=(),
        part=_no_part(),
        strategies=(),
        findings=find_in_memory(memory),
        quality=(
            Note(id="memory-only", detail="a memory snapshot: it holds memory and nothing else"),
            *snapshot.quality,
            *contradictions,
        ),
        memory=memory,
    )


def is_memory_only(rank: RankExplanation) -> bool:
    """Whether times and steps of this rank are not known at all."""
    return rank.memory is not None and rank.memory.source == "snapshot"


def refuse_mixtures(ranks: Sequence[RankExplanation]) -> None:
    """A snapshot has no rank and no clock: among other files it would only look like one."""
    if len(ranks) > 1 and any(is_memory_only(rank) for rank in ranks):
        which = next(rank.path for rank in ranks if is_memory_only(rank))
        raise UsageError(f"{which} is a memory snapshot: give it alone, one at a time")


def find_in_memory(memory: Memory) -> tuple[Finding, ...]:
    """The gravest first; what is held, where nothing is wrong."""
    findings = [
        finding
        for module in (memory_near_limit, fragmentation, memory_leak)
        if (finding := module.find_in(memory))
    ]
    return sort_findings([_what_is_held(memory), *findings])


def _what_is_held(memory: Memory) -> Finding:
    reserved = f" of {size(memory.reserved_bytes)} reserved" if memory.reserved_bytes else ""
    return healthy.RULE.finding(
        title="Memory",
        share=0.0,
        of="memory",
        severity="none",
        summary=f"{size(memory.peak_bytes)} allocated{reserved} ({memory.measured}), most of it "
        f"{biggest(memory)}.",
        evidence=(
            *held_words(memory),
            "no request failed, and little of what is reserved is unused",
        ),
        remedies=(
            remedies.STEPSCOPE_RUN.offer(
                "`stepscope run` separates parameters, gradients, optimizer state and activations"
            ),
        ),
    )


def _no_part() -> RankPart:
    none: Any = np.zeros(0, np.int64)
    calls = {name: none for name in CollectiveCalls.__struct_fields__ if name != "groups"}
    return RankPart(
        rank=0,
        calls=CollectiveCalls(groups=(), **calls),
        pace=RankSteps(**dict.fromkeys(RankSteps.__struct_fields__, none)),
    )


def _no_launches() -> Launches:
    unknown = ("latency_p50_ns", "latency_p90_ns", "queue_mean", "queue_max", "queue_empty_share")
    fields: dict[str, Any] = {
        name: None if name in unknown else 0 for name in Launches.__struct_fields__
    }
    return Launches(**fields)
