"""Communication that runs while nothing computes."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies, strategies
from stepscope.records.explanation import Collective, Remedy
from stepscope.records.strategies import RankStrategy
from stepscope.text.figures import milliseconds, percent, size
from stepscope.text.words import counted

# All messages of a step. Below this, latency decides on any link and bandwidth does not help.
SMALL_BYTES = 64 * 1024

_ACCUMULATE = remedies.ACCUMULATE.offer()
_BANDWIDTH = remedies.BANDWIDTH.offer(
    "Compress gradients with DDP's bf16_compress_hook, or use a faster link"
)
_PREFETCH = remedies.FSDP_PREFETCH.offer()
_FEWER_SPLITS = remedies.FEWER_SPLITS.offer()
_LARGER_BATCH = remedies.BATCH.offer(
    "Use a larger batch per rank, or fewer ranks: the messages are so small that latency decides, "
    "not bandwidth"
)
_OFFERS: dict[type, tuple[Remedy, ...]] = {
    strategies.RankDataParallel: (remedies.BUCKET_MB.offer(), _ACCUMULATE, _BANDWIDTH),
    strategies.RankFullySharded: (
        _PREFETCH,
        remedies.KEEP_GATHERED.offer(),
        remedies.REDUCE_DTYPE.offer(),
    ),
    strategies.RankTensorParallel: (_FEWER_SPLITS, remedies.SEQUENCE_PARALLEL.offer()),
    strategies.RankPipeline: (
        remedies.MICRO_BATCHES.offer(
            "Use more micro-batches: stages then wait less for each other"
        ),
    ),
    strategies.RankOtherCommunication: (
        remedies.LESS_OFTEN.offer(
            "Run these small collectives every N steps, or join them into one: loss sums, norms "
            "and barriers are not part of DDP or FSDP"
        ),
    ),
}
_OFFERS_IF_SMALL: dict[type, tuple[Remedy, ...]] = {
    strategies.RankDataParallel: (_ACCUMULATE, _LARGER_BATCH),
    strategies.RankFullySharded: (_PREFETCH, remedies.LARGER_BLOCKS.offer(), _LARGER_BATCH),
    strategies.RankTensorParallel: (_FEWER_SPLITS, _LARGER_BATCH),
}


def find(evidence: RankEvidence) -> Finding | None:
    share = evidence.budget_share("exposed_comm")
    if share < LOW:
        return None
    overlap = evidence.whole.overlap  # as the facts about the rank have it
    # For the strategy with the most exposed time.
    costliest = max(evidence.strategies, key=_exposed_ns, default=None)
    step_bytes = _step_bytes(costliest)
    small = step_bytes is not None and step_bytes < SMALL_BYTES
    offers = _OFFERS_IF_SMALL if small else _OFFERS
    return RULE.finding(
        share=share,
        summary=_summary(share),
        evidence=(
            f"exposed time: {evidence.budget_ms('exposed_comm')}",
            f"{percent(overlap)} of communication overlaps with compute"
            if overlap is not None
            else "no communication",
            *(_describe(evidence, calls) for calls in evidence.collectives[:3]),
            "time in a collective includes waiting for slower ranks",
        ),
        remedies=offers.get(type(costliest), (_ACCUMULATE, _BANDWIDTH)),
    )


def with_share(finding: Finding, share: float, step_ms: float) -> Finding:
    """The finding for a plain step: in the recorded ones the rank waited longer."""
    step = f"{milliseconds(share * step_ms)} of the {milliseconds(step_ms)} step"
    return replace(
        finding,
        share=share,
        severity=severity(share),
        summary=_summary(share),
        evidence=(
            f"exposed time: {step}",
            "in the recorded steps it waited longer, for a rank that the profiler slowed more",
        ),
    )


def _summary(share: float) -> str:
    return f"{percent(share)} of the step is communication that does not overlap with compute."


def _exposed_ns(strategy: RankStrategy) -> int:
    return (
        strategy.bubble_ns if isinstance(strategy, strategies.RankPipeline) else strategy.exposed_ns
    )


def _step_bytes(strategy: RankStrategy | None) -> int | None:
    """None where one of the sizes, or the strategy's traffic, is not known."""
    if isinstance(strategy, strategies.RankDataParallel):
        sizes = [bucket.size_bytes for bucket in strategy.buckets]
    elif isinstance(strategy, strategies.RankFullySharded):
        sizes = [block.size_bytes for block in strategy.blocks]
    elif isinstance(strategy, strategies.RankTensorParallel):
        sizes = [strategy.size_bytes]
    else:
        return None
    return None if None in sizes else sum(filter(None, sizes))


def _describe(evidence: RankEvidence, calls: Collective) -> str:
    """The exposed time of these calls."""
    whole = evidence.whole.exposed_comm_ns
    ms = evidence.budget_share("exposed_comm") * evidence.budget.step_ms
    part = ms * calls.exposed_ns / whole if whole else 0.0
    name = calls.kind if calls.size_bytes is None else f"{calls.kind} of {size(calls.size_bytes)}"
    return f"{name}: {milliseconds(part)} of this, {counted(calls.count, 'call')} in the trace"


RULE = FindingRule(id="exposed-communication", title="Exposed communication", find=find)
