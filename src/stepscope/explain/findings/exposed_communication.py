"""Communication that no compute hides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.records import remedies
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

    from stepscope.records.explanation import Collective, Finding, Remedy
    from stepscope.records.strategies import RankStrategy

# A step's messages together: below, latency decides on any link, and no bandwidth helps.
SMALL_BYTES = 64 * 1024

_BUCKETS = remedies.BUCKET_MB.offer("other DDP bucket sizes start communication earlier")
_ACCUMULATE = remedies.ACCUMULATE.offer(
    "accumulate gradients: communicate every N-th step (no_sync)"
)
_BANDWIDTH = remedies.BANDWIDTH.offer("compress gradients (bf16 comm hook) or use a faster link")
_PREFETCH = remedies.FSDP_PREFETCH.offer(
    "gather ahead: set_modules_to_forward_prefetch and set_modules_to_backward_prefetch",
)
_LARGER_BLOCKS = remedies.LARGER_BLOCKS.offer(
    "call fully_shard on larger blocks: fewer and longer gathers"
)
_RESHARD = remedies.KEEP_GATHERED.offer(
    "reshard_after_forward=False where memory allows: backward gathers nothing again",
)
_REDUCE = remedies.REDUCE_DTYPE.offer(
    "gather and reduce in bf16 (MixedPrecisionPolicy): half the bytes"
)
_FEWER_SPLITS = remedies.FEWER_SPLITS.offer(
    "split layers over fewer ranks, inside one host, and use the others as replicas",
)
_SEQUENCE = remedies.SEQUENCE_PARALLEL.offer(
    "SequenceParallel between the split layers: reduce-scatter and gather can overlap",
)
_MICRO_BATCHES = remedies.MICRO_BATCHES.offer("more micro-batches fill the time that stages wait")
_LESS_OFTEN = remedies.LESS_OFTEN.offer(
    "these calls belong to no strategy (a loss that is summed, norms, a barrier): make "
    "them every N-th step, or one call of all",
)
_LARGER_BATCH = remedies.BATCH.offer(
    "a larger batch a rank, or fewer ranks: the messages are so small that each waits for "
    "latency, which no bandwidth shortens",
)


def find(evidence: RankEvidence) -> Finding | None:
    """exposed_comm of the timeline."""
    timeline = evidence.timeline
    share = evidence.budget_share("exposed_comm")
    if share < LOW:
        return None
    overlap = timeline.overlap
    return RULE.finding(
        share=share,
        severity=severity(share),
        summary=f"{share:.0%} of the step is communication that nothing hides.",
        evidence=(
            f"exposed: {evidence.budget_ms('exposed_comm')}",
            f"{overlap:.0%} of communication overlaps compute"
            if overlap is not None
            else "no communication",
            *(_line(evidence, each) for each in evidence.collectives[:3]),
            "time in a collective includes waiting for slower ranks",
        ),
        remedies=_remedies(evidence),
    )


def _remedies(evidence: RankEvidence) -> tuple[Remedy, ...]:
    """What helps the strategy that exposes most; small messages wait for latency, not for bytes."""
    costliest = max(evidence.strategies, key=_exposed_ns, default=None)
    size: int | None = None
    found: tuple[Remedy, ...]
    if isinstance(costliest, RankDataParallel):
        size = _sum(bucket.size_bytes for bucket in costliest.buckets)
        found = (_ACCUMULATE,) if _is_small(size) else (_BUCKETS, _ACCUMULATE, _BANDWIDTH)
    elif isinstance(costliest, RankFullySharded):
        size = _sum(block.size_bytes for block in costliest.blocks)
        found = (_PREFETCH, _LARGER_BLOCKS) if _is_small(size) else (_PREFETCH, _RESHARD, _REDUCE)
    elif isinstance(costliest, RankTensorParallel):
        size = costliest.size_bytes
        found = (_FEWER_SPLITS,) if _is_small(size) else (_FEWER_SPLITS, _SEQUENCE)
    elif isinstance(costliest, RankPipeline):
        found = (_MICRO_BATCHES,)
    elif isinstance(costliest, RankOtherCommunication):
        found = (_LESS_OFTEN,)
    else:
        found = (_ACCUMULATE, _BANDWIDTH)
    return (*found, _LARGER_BATCH) if _is_small(size) else found


def _exposed_ns(strategy: RankStrategy) -> int:
    return strategy.bubble_ns if isinstance(strategy, RankPipeline) else strategy.exposed_ns


def _sum(sizes: Iterable[int | None]) -> int | None:
    known = list(sizes)
    return None if None in known else sum(size for size in known if size is not None)


def _is_small(size_bytes: int | None) -> bool:
    return size_bytes is not None and size_bytes < SMALL_BYTES


def _line(evidence: RankEvidence, each: Collective) -> str:
    """Its part of the exposed time. Calls add up to that, less what surrounds them."""
    whole = evidence.whole.exposed_comm_ns
    ms = evidence.budget_share("exposed_comm") * evidence.budget.step_ms
    part = ms * each.exposed_ns / whole if whole else 0.0
    return f"{each.kind}: {part:.2f} ms of that, {counted(each.count, 'call')} in the trace"


RULE = FindingRule(
    id="exposed-communication", scope="rank", title="Exposed communication", find=find
)
