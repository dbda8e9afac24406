"""Communication that runs while nothing computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.figures import milliseconds, percent, size
from stepscope.records.strategies import (
    RankDataParallel,
    RankFullySharded,
    RankOtherCommunication,
    RankPipeline,
    RankTensorParallel,
)
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.records.explanation import Collective, Remedy
    from stepscope.records.strategies import RankStrategy

# All messages of a step. Below this, latency decides on any link and bandwidth does not help.
SMALL_BYTES = 64 * 1024

_BUCKETS = remedies.BUCKET_MB.offer()
_ACCUMULATE = remedies.ACCUMULATE.offer()
_BANDWIDTH = remedies.BANDWIDTH.offer(
    "compress gradients (bf16 communication hook) or use a faster link"
)
_PREFETCH = remedies.FSDP_PREFETCH.offer()
_LARGER_BLOCKS = remedies.LARGER_BLOCKS.offer()
_RESHARD = remedies.KEEP_GATHERED.offer()
_REDUCE = remedies.REDUCE_DTYPE.offer()
_FEWER_SPLITS = remedies.FEWER_SPLITS.offer()
_SEQUENCE = remedies.SEQUENCE_PARALLEL.offer()
_MICRO_BATCHES = remedies.MICRO_BATCHES.offer(
    "use more micro-batches: stages wait less for each other"
)
_LESS_OFTEN = remedies.LESS_OFTEN.offer(
    "make these calls every N-th step or join them into one: they belong to no parallel strategy "
    "(a summed loss, norms, a barrier)"
)
_LARGER_BATCH = remedies.BATCH.offer(
    "use a larger batch per rank, or fewer ranks: the messages are so small that latency decides, "
    "not bandwidth"
)


def find(evidence: RankEvidence) -> Finding | None:
    timeline = evidence.timeline
    share = evidence.budget_share("exposed_comm")
    if share < LOW:
        return None
    overlap = timeline.overlap
    return RULE.finding(
        share=share,
        summary=f"{percent(share)} of the step is communication during which nothing computes.",
        evidence=(
            f"not hidden by compute: {evidence.budget_ms('exposed_comm')}",
            f"{percent(overlap)} of communication overlaps compute"
            if overlap is not None
            else "no communication",
            *(_describe(evidence, calls) for calls in evidence.collectives[:3]),
            "time in a collective includes waiting for slower ranks",
        ),
        remedies=_offer(evidence),
    )


def _offer(evidence: RankEvidence) -> tuple[Remedy, ...]:
    """For the strategy with the most exposed time. Small messages wait for latency, not bytes."""
    costliest = max(evidence.strategies, key=_exposed_ns, default=None)
    step_bytes: int | None = None
    offers: tuple[Remedy, ...]
    if isinstance(costliest, RankDataParallel):
        step_bytes = _sum(bucket.size_bytes for bucket in costliest.buckets)
        offers = (_ACCUMULATE,) if _is_small(step_bytes) else (_BUCKETS, _ACCUMULATE, _BANDWIDTH)
    elif isinstance(costliest, RankFullySharded):
        step_bytes = _sum(block.size_bytes for block in costliest.blocks)
        offers = (
            (_PREFETCH, _LARGER_BLOCKS) if _is_small(step_bytes) else (_PREFETCH, _RESHARD, _REDUCE)
        )
    elif isinstance(costliest, RankTensorParallel):
        step_bytes = costliest.size_bytes
        offers = (_FEWER_SPLITS,) if _is_small(step_bytes) else (_FEWER_SPLITS, _SEQUENCE)
    elif isinstance(costliest, RankPipeline):
        offers = (_MICRO_BATCHES,)
    elif isinstance(costliest, RankOtherCommunication):
        offers = (_LESS_OFTEN,)
    else:
        offers = (_ACCUMULATE, _BANDWIDTH)
    return (*offers, _LARGER_BATCH) if _is_small(step_bytes) else offers


def _exposed_ns(strategy: RankStrategy) -> int:
    return strategy.bubble_ns if isinstance(strategy, RankPipeline) else strategy.exposed_ns


def _sum(sizes: Iterable[int | None]) -> int | None:
    known = list(sizes)
    return None if None in known else sum(size for size in known if size is not None)


def _is_small(size_bytes: int | None) -> bool:
    return size_bytes is not None and size_bytes < SMALL_BYTES


def _describe(evidence: RankEvidence, calls: Collective) -> str:
    """The exposed time of these calls."""
    whole = evidence.whole.exposed_comm_ns
    ms = evidence.budget_share("exposed_comm") * evidence.budget.step_ms
    part = ms * calls.exposed_ns / whole if whole else 0.0
    name = calls.kind if calls.size_bytes is None else f"{calls.kind} of {size(calls.size_bytes)}"
    return f"{name}: {milliseconds(part)} of this, {counted(calls.count, 'call')} in the trace"


RULE = FindingRule(id="exposed-communication", title="Exposed communication", find=find)
