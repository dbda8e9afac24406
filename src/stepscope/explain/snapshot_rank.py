"""A CUDA memory snapshot as a rank whose memory is known, but no step, timeline or work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.errors import UsageError
from stepscope.explain.findings import healthy, memory_leak, memory_near_limit, sort_findings
from stepscope.explain.findings.fragmentation import find_in as find_fragmentation
from stepscope.explain.memory.words import biggest, held_words
from stepscope.explain.untimed_rank import MEMORY_ONLY, untimed_rank
from stepscope.records import remedies
from stepscope.records.figures import size
from stepscope.records.quality import Note

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.records.explanation import Finding, RankExplanation
    from stepscope.records.memory import Memory


def explain_snapshot(path: Path, name: str, limit_bytes: int | None) -> RankExplanation:
    """`path` is where the file can be read, `name` what the user calls it."""
    from stepscope.explain.memory.snapshot import memory_of_snapshot
    from stepscope.trace.snapshot import read_snapshot

    snapshot = read_snapshot(path)
    memory, contradictions = memory_of_snapshot(snapshot, limit_bytes)
    return untimed_rank(
        path=name,
        kind="cuda",
        events=sum(len(history) for history in snapshot.histories),
        findings=find_in_memory(memory),
        quality=(
            Note(id=MEMORY_ONLY, detail="a memory snapshot: it holds memory and nothing else"),
            *snapshot.quality,
            *contradictions,
        ),
        memory=memory,
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
        summary=f"{size(memory.peak_bytes)} allocated{reserved} ({memory.measured}). Most of it is "
        f"{biggest(memory)}.",
        evidence=(
            *held_words(memory),
            "no request failed, and little of what is reserved is unused",
        ),
        remedies=(
            remedies.STEPSCOPE_RUN.offer(
                "Record with `stepscope run`: it separates parameters, gradients, optimizer state "
                "and activations"
            ),
        ),
    )
