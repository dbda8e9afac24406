"""More workers, other links and other buckets for many steps at once, without replaying each.

What does not depend on a step's other changes (links by number of workers, the slowest worker, what
goes into which bucket) is found once: the setup. Of each changed step only its tables are kept
(contracted_step.py). Both together give what `scale_out.replan` gives, for any number of workers
and any link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.predict.buckets import CAP_BYTES, fill_buckets, find_gradients
from stepscope.predict.exchange import bucket_copy_ns, ddp_cost, first_forward_call
from stepscope.predict.norm_buffers import find_norm_buffers
from stepscope.predict.outcome import Refused
from stepscope.predict.scale_out import describe_batch, find_link_times, share_of_batch
from stepscope.predict.slowest_worker import find_straggling
from stepscope.predict.traced_exchange import find_traced_exchange
from stepscope.records.prediction import Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.buckets import Buckets, Gradients
    from stepscope.predict.step_context import StepContext
    from stepscope.predict.traced_exchange import TracedExchange
    from stepscope.predict.whatif import Bench
    from stepscope.records.profile import Segment

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BUCKETS_MB = (1, 5, 10, 25, 50, 100)
_MB = 1 << 20
_MAX_BUCKETS = 60  # of one size: more are not worth their place in the report

Line = tuple[float, float, float]  # up to this many bytes, ns, ns per byte
Moment = tuple[str, int]  # what becomes ready: "gradient" or "bucket" and its number


class WorkerLink(msgspec.Struct, frozen=True, kw_only=True):
    """The link between `ranks` workers."""

    ranks: int
    straggling: float
    spread: float
    basis: str
    all_reduce: tuple[Line, ...] = ()  # none for one worker
    broadcast: tuple[Line, ...] = ()
    beside: tuple[Line, ...] = ()  # an all-reduce while the host computes
    lost: float = 0.0
    said: tuple[str, ...] = ()  # assumptions


class BucketLayout(msgspec.Struct, frozen=True, kw_only=True):
    bucket_mb: float | None  # None: as it is now
    size_bytes: tuple[float, ...]
    marks: tuple[int, ...]  # the moment of each bucket, by number; none if they are traced
    host_ns: tuple[float, ...]  # what DDP takes for each
    fill_ns: tuple[float, ...]
    # What the link carries meanwhile, if buckets of the trace overlap: their transfers' price.
    carried_bytes: tuple[float, ...] = ()


class ScalingSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What all steps have in common."""

    before: int  # workers of the trace
    on_host: bool
    links: tuple[WorkerLink, ...]  # by number of workers
    ways: tuple[BucketLayout, ...]  # the present one first
    retimed: bool  # the present buckets are tasks of the trace
    finish_ns: float  # of the host, after the last sum
    # Batch norms' statistics before forward: bytes of each message, the host's time for it and
    # after it.
    sent_bytes: tuple[float, ...] = ()
    send_ns: float = 0.0
    sent_ns: float = 0.0
    moments: int = 0
    forward: int = -1  # the number of the moment at which forward begins
    places: tuple[Moment, ...] = ()  # the moments, in order
    no_buckets: str = ""  # why there are no other sizes
    no_share: str = ""  # why the batch cannot be shared
    held_bytes: int = 0  # by the buckets, if the trace has none yet
    traced: TracedExchange | None = None
    rows: tuple[int, ...] = ()  # of the trace: the tasks of its exchange


class CannotScale(Exception):  # noqa: N818 - an answer, not a failure
    """Why nothing can be said about more workers."""


def find_scaling_setup(bench: Bench) -> ScalingSetup:
    """Raises CannotScale with the what-if's own reason."""
    context = bench.context
    traced = find_traced_exchange(context, context.graph)
    before = traced.ranks if traced else 1
    assumptions = _assumptions_by_workers(bench, before)
    has_tasks = traced is not None and len(traced.tasks) > 0
    gradients = find_gradients(context, context.graph)
    plans = _plan_sizes(traced, gradients)
    moments = _find_moments(context.graph, traced, gradients, plans, has_tasks)
    add_ddp = traced is None
    norm_buffers = find_norm_buffers(context) if add_ddp else None
    cost = ddp_cost(on_host=context.on_host)
    return ScalingSetup(
        before=before,
        on_host=context.on_host,
        links=tuple(
            _find_link(context, traced, ranks, before, assumptions[ranks])
            for ranks in sorted(assumptions)
        ),
        ways=tuple(_lay_out(context, gradients, plan, moments, traced) for plan in plans),
        retimed=has_tasks,
        finish_ns=cost.step_ns if add_ddp else 0.0,
        sent_bytes=tuple(map(float, norm_buffers.messages_bytes)) if norm_buffers else (),
        send_ns=cost.bucket_ns,
        sent_ns=cost.tensor_ns * norm_buffers.tensors if norm_buffers else 0.0,
        moments=len(moments),
        forward=moments.index(("forward", 0)) if moments else -1,
        places=tuple(moments),
        traced=traced,
        rows=tuple(context.graph.tasks.row[traced.tasks].tolist()) if traced else (),
        no_buckets="" if gradients else "The trace does not give the gradients' sizes",
        no_share=_why_not_shared(context),
        held_bytes=int(plans[0].buckets.size_bytes.sum()) if add_ddp and plans else 0,
    )


def _assumptions_by_workers(bench: Bench, before: int) -> dict[int, tuple[str, ...]]:
    """What is assumed about each number of workers, whatever their batch."""
    by_workers: dict[int, tuple[str, ...]] = {before: ()}
    own_batch = describe_batch(on_host=bench.context.on_host, strong=False)
    # The fewest that exchange something come first: a refusal names their number.
    for ranks in sorted({*WORKERS} - {before}, key=lambda ranks: (ranks < 2, ranks)):
        trial = bench.change(bench.begin(), Setting(name="workers", value=str(ranks)))
        if trial.refused:
            raise CannotScale(trial.refused[-1])
        by_workers[ranks] = tuple(line for line in trial.assumptions if line != own_batch)
    return by_workers


def _why_not_shared(context: StepContext) -> str:
    """Whatever the batch is."""
    try:
        share_of_batch(replace(context, batch=None), 1, 0.5)
    except Refused as reason:
        return str(reason)
    return ""


def _find_link(
    context: StepContext,
    traced: TracedExchange | None,
    ranks: int,
    before: int,
    assumptions: tuple[str, ...],
) -> WorkerLink:
    straggling = find_straggling(context, ranks, before)
    link = WorkerLink(
        ranks=ranks, straggling=straggling, spread=0.0, basis="none", said=assumptions
    )
    times = find_link_times(context, traced, ranks)
    if times is None:
        return link
    contention = times.contention if context.on_host else None
    return replace(
        link,
        spread=times.spread,
        basis=times.basis,
        all_reduce=_lines(times.lines["all_reduce"]),
        broadcast=_lines(times.lines["broadcast"]),
        beside=_lines(contention.beside) if contention else (),
        lost=contention.lost if contention else 0.0,
    )


def _lines(segments: Sequence[Segment]) -> tuple[Line, ...]:
    return tuple((float(s.to_bytes), s.alpha_ns, s.beta_ns_per_byte) for s in segments)


# Buckets, and the moments at which they are ready


class _SizePlan(msgspec.Struct, frozen=True, kw_only=True):
    bucket_mb: float | None  # None: as it is now
    buckets: Buckets
    marked_by: str  # "bucket" of the trace, or "gradient"


def _plan_sizes(traced: TracedExchange | None, gradients: Gradients | None) -> list[_SizePlan]:
    """The present buckets, and each size that makes other buckets than those before it."""
    plans: list[_SizePlan] = []
    if traced and traced.buckets:
        plans.append(_SizePlan(bucket_mb=None, buckets=traced.buckets, marked_by="bucket"))
    if gradients is None:
        return plans
    has_usual_size = not plans
    if has_usual_size:
        usual = fill_buckets(gradients)
        plans.append(_SizePlan(bucket_mb=None, buckets=usual, marked_by="gradient"))
    for size in BUCKETS_MB:
        if has_usual_size and size * _MB == CAP_BYTES:
            continue
        buckets = fill_buckets(gradients, size * _MB, size * _MB)
        known = any(np.array_equal(buckets.size_bytes, plan.buckets.size_bytes) for plan in plans)
        if not known and len(buckets) <= _MAX_BUCKETS:
            plans.append(_SizePlan(bucket_mb=float(size), buckets=buckets, marked_by="gradient"))
    return plans


def _find_moments(
    graph: StepGraph,
    traced: TracedExchange | None,
    gradients: Gradients | None,
    plans: list[_SizePlan],
    has_tasks: bool,
) -> list[Moment]:
    """When a gradient or one of the trace's buckets is ready, forward begins, backward ends."""
    if not plans:
        return []
    calls: dict[Moment, int] = {}
    if traced and traced.buckets and not has_tasks:
        calls |= {("bucket", i): call for i, call in enumerate(traced.buckets.ready.tolist())}
    if gradients is not None:
        closing = {
            number
            for plan in plans
            if plan.marked_by == "gradient"
            for number in _closing_gradients(plan.buckets, gradients)
        }
        calls |= {("gradient", number): int(gradients.ready[number]) for number in closing}
    ready = sorted(calls, key=lambda moment: calls[moment])
    first = first_forward_call(graph)
    before = sum(calls[moment] < first for moment in ready)
    return [*ready[:before], ("forward", 0), *ready[before:], ("end", 0)]


def _lay_out(
    context: StepContext,
    gradients: Gradients | None,
    plan: _SizePlan,
    moments: list[Moment],
    traced: TracedExchange | None,
) -> BucketLayout:
    buckets, on_host, add_ddp = plan.buckets, context.on_host, traced is None
    shared = traced is not None and buckets is traced.buckets and traced.carried_bytes is not None
    none = np.zeros(len(buckets))
    host = ddp_cost(on_host=on_host).filling_ns(buckets) if add_ddp else none
    fill = bucket_copy_ns(buckets, context.ceilings, on_host=on_host) if add_ddp else none
    return BucketLayout(
        bucket_mb=plan.bucket_mb,
        size_bytes=tuple(buckets.size_bytes.astype(np.float64).tolist()),
        carried_bytes=tuple(traced.sizes.tolist()) if traced and shared else (),
        marks=_mark_buckets(gradients, plan, moments),
        host_ns=tuple(host.tolist()),
        fill_ns=tuple(fill.tolist()),
    )


def _mark_buckets(
    gradients: Gradients | None, plan: _SizePlan, moments: list[Moment]
) -> tuple[int, ...]:
    if plan.marked_by == "gradient" and gradients is not None:
        marks = [("gradient", number) for number in _closing_gradients(plan.buckets, gradients)]
    else:
        marks = [("bucket", number) for number in range(len(plan.buckets))]
    return tuple(map(moments.index, marks)) if marks[0] in moments else ()


def _closing_gradients(buckets: Buckets, gradients: Gradients) -> list[int]:
    """The gradient that closes each bucket; with several types, the last that is ready then."""
    ends: list[int] = (np.cumsum(buckets.tensors) - 1).tolist()
    if len(np.unique(gradients.dtype)) == 1:
        return ends
    last = {call: number for number, call in enumerate(gradients.ready.tolist())}
    return [last[call] for call in buckets.ready.tolist()]
