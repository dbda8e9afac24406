"""Findings about communication that one rank shows."""

from __future__ import annotations

import re

import numpy as np
from msgspec.structs import replace

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import (
    LOW,
    RankEvidence,
    costliest_places,
    rule,
    severity_of,
)
from stepscope.explain.strategies.data_parallel import FORWARD
from stepscope.records import strategies
from stepscope.records.explanation import Collective, Finding, Place, Remedy
from stepscope.records.strategies import RankDataParallel, RankStrategy
from stepscope.records.trace import HostKind
from stepscope.step import intervals
from stepscope.step.work import rows_named, spans_of
from stepscope.text.figures import milliseconds, percent, size
from stepscope.text.words import counted, plural
from stepscope.trace.links import nearest_of

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


@rule("Exposed communication")
def exposed_communication(evidence: RankEvidence) -> Finding | None:
    """Communication that runs while nothing computes."""
    share = evidence.budget_share("exposed_comm")
    if share < LOW:
        return None
    overlap = evidence.whole.overlap  # as the facts about the rank have it
    # For the strategy with the most exposed time.
    costliest = max(evidence.strategies, key=_exposed_ns, default=None)
    step_bytes = _step_bytes(costliest)
    small = step_bytes is not None and step_bytes < SMALL_BYTES
    offers = _OFFERS_IF_SMALL if small else _OFFERS
    return exposed_communication.finding(
        share=share,
        summary=_exposed_summary(share),
        evidence=(
            f"exposed time: {evidence.budget_ms('exposed_comm')}",
            f"{percent(overlap)} of communication overlaps with compute"
            if overlap is not None
            else "no communication",
            *(_describe_calls(evidence, calls) for calls in evidence.collectives[:3]),
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
        severity=severity_of(share),
        summary=_exposed_summary(share),
        evidence=(
            f"exposed time: {step}",
            "in the recorded steps it waited longer, for a rank that the profiler slowed more",
        ),
    )


def _exposed_summary(share: float) -> str:
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


def _describe_calls(evidence: RankEvidence, calls: Collective) -> str:
    """The exposed time of these calls."""
    whole = evidence.whole.exposed_comm_ns
    ms = evidence.budget_share("exposed_comm") * evidence.budget.step_ms
    part = ms * calls.exposed_ns / whole if whole else 0.0
    name = calls.kind if calls.size_bytes is None else f"{calls.kind} of {size(calls.size_bytes)}"
    return f"{name}: {milliseconds(part)} of this, {counted(calls.count, 'call')} in the trace"


@rule("Gradients exchanged every pass")
def exchange_every_pass(evidence: RankEvidence) -> Finding | None:
    """Gradients that DDP exchanges in every backward pass of a step, though only their sum
    is used."""
    replicas = [s for s in evidence.strategies if isinstance(s, strategies.RankDataParallel)]
    part = max(replicas, key=lambda one: one.early_exposed_ns, default=None)
    if part is None or part.passes < 2:
        return None
    share = _early_share(evidence, part)
    if share < LOW:
        return None
    last = len(part.buckets) // part.passes
    first = f"first {part.passes - 1}" if part.passes > 2 else "first"
    return exchange_every_pass.finding(
        share=share,
        summary=f"{percent(share)} of the step goes into exchanging gradients in the {first} of "
        f"{part.passes} backward passes. One exchange after the last pass is enough.",
        evidence=(
            f"exposed time before the last pass: {evidence.step_ms(share)}",
            f"{counted(len(part.buckets), 'all-reduce')} in a step of {part.passes} passes, where "
            f"{last} would be enough",
            *_bytes(part),
        ),
        where=_forward_places(evidence),
        remedies=(
            remedies.SYNC_ONCE.offer(
                f"Run the {first} {plural(part.passes - 1, 'pass', 'passes')} of a step under "
                "DDP's no_sync(): gradients are then exchanged once a step"
            ),
        ),
    )


def _early_share(evidence: RankEvidence, part: RankDataParallel) -> float:
    """Of the budget's exposed communication, what the earlier passes cause in the window."""
    whole = evidence.timeline.exposed_comm_ns / max(1, evidence.cycles)
    if not whole:
        return 0.0
    return evidence.budget_share("exposed_comm") * min(1.0, part.early_exposed_ns / whole)


def _bytes(part: RankDataParallel) -> tuple[str, ...]:
    sizes = [bucket.size_bytes for bucket in part.buckets]
    known = [one for one in sizes if one is not None]
    if len(known) < len(sizes):
        return ()
    total = sum(known)
    return (f"{size(total)} are exchanged in a step instead of {size(total // part.passes)}",)


def _forward_places(evidence: RankEvidence) -> tuple[Place, ...]:
    """The lines that call DDP's forward, where stacks were recorded."""
    trace, host = evidence.trace, evidence.trace.host
    named = rows_named(trace, host, host.kind == HostKind.ANNOTATION, lambda s: s == FORWARD)
    rows = np.flatnonzero(named).astype(np.int32)
    return costliest_places(trace, rows, host.dur_ns[rows])


_SPAN = re.compile(r"^gloo:")
# The library that moves data between devices, by kind of device.
_INSTEAD = {"cuda": "nccl", "rocm": "nccl", "xpu": "xccl"}


@rule("gloo instead of NCCL")
def gloo_on_device(evidence: RankEvidence) -> Finding | None:
    """Collectives on device tensors that gloo runs on the host while the device idles. Idle
    time of the device while gloo moves its tensors."""
    library = _INSTEAD.get(evidence.trace.kind)
    if evidence.on_host or library is None:
        return None
    # gloo's spans that launch copies; all of them where the capture shows that no group has
    # another backend for the device.
    trace, host = evidence.trace, evidence.trace.host
    named = rows_named(trace, host, host.kind <= HostKind.ANNOTATION, _SPAN.match)
    if named.any() and not _has_only_gloo(evidence):
        around = nearest_of(host, named, trace.device.launch)
        named = np.zeros(len(host), np.bool_)
        named[around[around >= 0]] = True
    spans = spans_of(host, named)
    gaps = evidence.gaps.start_ns, evidence.gaps.end_ns
    share = evidence.idle_share(intervals.length(intervals.intersect(spans, gaps)))
    if share < LOW:
        return None
    window = evidence.timeline.start_ns, evidence.timeline.start_ns + evidence.timeline.span_ns
    works = evidence.window_share(intervals.length(intervals.clip(spans, *window)))
    device = evidence.device
    return gloo_on_device.finding(
        title="" if library == "nccl" else f"gloo instead of {library.upper()}",
        share=share,
        summary=f"The {device} is idle {percent(share)} of the step while gloo exchanges its "
        "tensors through the CPU.",
        evidence=(
            f"idle while gloo works: {evidence.step_ms(share)}",
            f"gloo works for {percent(works)} of the recorded steps: it copies each tensor to the "
            "CPU and back",
            *(
                f"group {name}: backend {backend}"
                for name, backend in _read_backends(evidence).items()
            ),
        ),
        remedies=(
            remedies.USE_NCCL.offer(
                f'Call init_process_group("{library}"): {library.upper()} moves tensors directly '
                "between devices. Keep gloo for CPU tensors"
            ),
        ),
    )


def _has_only_gloo(evidence: RankEvidence) -> bool:
    """Whether a model in DDP or FSDP has no other backend for its gradients."""
    backends = [_device_backend(text) for text in _read_backends(evidence).values()]
    spread = any(evidence.layout.get(name) for name in ("ddp", "fsdp_modules", "placements"))
    return spread and bool(backends) and all(name == "gloo" for name in backends)


def _read_backends(evidence: RankEvidence) -> dict[str, str]:
    """Group -> backend in torch's words, such as cpu:gloo,cuda:nccl."""
    groups = evidence.layout.get("groups") or ()
    return {str(row.get("name")): str(row.get("backend") or "") for row in groups}


def _device_backend(backend: str) -> str:
    """The backend for the device; a single name is for all devices."""
    parts = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return next((name for kind, name in parts.items() if kind != "cpu"), backend)
