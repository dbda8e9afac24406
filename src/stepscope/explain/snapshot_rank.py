"""A CUDA memory snapshot as a rank whose memory is known, but no step, timeline or work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.errors import UsageError
from stepscope.explain.empty_part import empty_part
from stepscope.explain.findings import healthy, memory_leak, memory_near_limit, sort_findings
from stepscope.explain.findings.fragmentation import find_in as find_fragmentation
from stepscope.explain.launches import no_launches
from stepscope.explain.memory.words import biggest, held_words
from stepscope.records import remedies
from stepscope.records.explanation import Budget, Idle, RankExplanation, Steps, StepTime, Timeline
from stepscope.records.figures import size
from stepscope.records.quality import Note

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.records.explanation import Finding
    from stepscope.records.memory import Memory

_TABLES = ("kernels", "operators", "modules", "lines", "copies", "syncs", "collectives")


def explain_snapshot(path: Path, name: str, limit_bytes: int | None) -> RankExplanation:
    """`path` is where the file can be read, `name` what the user calls it."""
    from stepscope.explain.memory.snapshot import memory_of_snapshot
    from stepscope.trace.snapshot import read_snapshot

    snapshot = read_snapshot(path)
    memory, contradictions = memory_of_snapshot(snapshot, limit_bytes)
    absent: dict[str, Any] = dict.fromkeys(("rank", "world_size", "device", "gaps"))
    empty: dict[str, Any] = dict.fromkeys(_TABLES, ())
    return RankExplanation(
        path=name,
        kind="cuda",
        events=sum(len(history) for history in snapshot.histories),
        timeline=Timeline(**dict.fromkeys(Timeline.__struct_fields__, 0)),
        idle=Idle(**dict.fromkeys(Idle.__struct_fields__, 0)),
        steps=Steps(source="window", steps=(), cycles_ns=(), window_start_ns=0, window_end_ns=0),
        step_ms=StepTime(profiled=None),
        budget=Budget(step_ms=0.0, parts=(), basis="window"),
        launches=no_launches(),
        part=empty_part(rank=0),
        strategies=(),
        findings=find_in_memory(memory),
        quality=(
            Note(id="memory-only", detail="a memory snapshot: it holds memory and nothing else"),
            *snapshot.quality,
            *contradictions,
        ),
        memory=memory,
        **absent,
        **empty,
    )


def is_memory_only(rank: RankExplanation) -> bool:
    """Whether nothing but the memory of this rank is known."""
    return rank.memory is not None and rank.memory.source == "snapshot"


def refuse_mixtures(ranks: Sequence[RankExplanation]) -> None:
    """A snapshot has no rank and no clock: among other files it would only look like one."""
    snapshots = [rank.path for rank in ranks if is_memory_only(rank)]
    if snapshots and len(ranks) > 1:
        raise UsageError(f"{snapshots[0]} is a memory snapshot: give it alone, one at a time")


def find_in_memory(memory: Memory) -> tuple[Finding, ...]:
    """The most severe first; with nothing wrong, what the memory holds."""
    rules = (memory_near_limit.find_in, find_fragmentation, memory_leak.find_in)
    problems = [finding for find in rules if (finding := find(memory))]
    return sort_findings([_describe_contents(memory), *problems])


def _describe_contents(memory: Memory) -> Finding:
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
