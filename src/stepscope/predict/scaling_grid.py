"""More workers, other links and other buckets for many steps at once, without replaying each.

What does not hang on a step's other changes (links by number of workers, the slowest of them, what
goes into which bucket) is found once: the crew. Of each changed step only its outline is kept. With
both, `crew_step` gives what `scale_out.replan` gives, for any number of workers and any link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import Phase
from stepscope.predict import exchange
from stepscope.predict.buckets import CAP_BYTES, fill_buckets, find_gradients
from stepscope.predict.kernels import FLOOR_NS, copy_ns
from stepscope.predict.norm_buffers import find_norm_buffers
from stepscope.predict.outcome import Refused
from stepscope.predict.scale_out import describe_batch, share_of_batch
from stepscope.predict.slowest_worker import find_straggling
from stepscope.predict.traced_exchange import find_traced_exchange
from stepscope.predict.transfers import find_transfer_times
from stepscope.records.devices import find_device
from stepscope.records.prediction import Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.buckets import Buckets, Gradients
    from stepscope.predict.step_context import StepContext
    from stepscope.predict.traced_exchange import TracedExchange
    from stepscope.predict.transfers import TransferTimes
    from stepscope.predict.whatif import Bench
    from stepscope.records.profile import Segment

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BUCKETS_MB = (1, 5, 10, 25, 50, 100)
_MB = 1 << 20
_MOST_BUCKETS = 60  # of one size: more are not worth their place in the report

Line = tuple[float, float, float]  # up to so many bytes, ns, ns a byte


class WorkerLink(msgspec.Struct, frozen=True, kw_only=True):
    """Between so many workers."""

    ranks: int
    straggling: float
    spread: float
    basis: str
    all_reduce: tuple[Line, ...] = ()  # none for one worker
    broadcast: tuple[Line, ...] = ()
    beside: tuple[Line, ...] = ()  # an all-reduce while the host computes
    lost: float = 0.0
    said: tuple[str, ...] = ()


class BucketLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients in buckets of one size."""

    bucket_mb: float | None  # None: as it is now
    size_bytes: tuple[float, ...]
    marks: tuple[int, ...]  # the moment of each, among the outline's; none where they are traced
    host_ns: tuple[float, ...]  # what DDP takes for each
    fill_ns: tuple[float, ...]


class ScalingSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What all steps have in common."""

    before: int
    on_host: bool
    links: tuple[WorkerLink, ...]  # by number of workers
    ways: tuple[BucketLayout, ...]  # as now first
    retimed: bool  # buckets as now are tasks of the trace
    finish_ns: float  # of the host, behind the last sum
    # Batch norms' statistics before forward: bytes of each message, the host's time for it, behind.
    sent_bytes: tuple[float, ...] = ()
    send_ns: float = 0.0
    sent_ns: float = 0.0
    moments: int = 0
    forward: int = -1  # which moment forward is
    places: tuple[tuple[str, int], ...] = ()  # what every moment is, in order
    no_buckets: str = ""  # why there are no other sizes
    no_share: str = ""  # why the batch cannot be shared
    held_bytes: int = 0  # of the buckets, where the trace has none yet
    traced: TracedExchange | None = None
    rows: tuple[int, ...] = ()  # of the trace, of those tasks


class CannotScale(Exception):  # noqa: N818 - an answer, not a failure
    """Why nothing can be said about more workers."""


def find_scaling_setup(bench: Bench) -> ScalingSetup:
    """Raises CannotScale with the what-if's own reason."""
    context = bench.context
    traced = find_traced_exchange(context, context.graph)
    before = traced.ranks if traced else 1
    said = _tried(bench, before)
    keeps = traced is not None and len(traced.tasks) > 0
    gradients = find_gradients(context, context.graph)
    plans = _plans(traced, gradients)
    places = _places(context.graph, traced, gradients, plans, keeps)
    toll = traced is None
    statistics = find_norm_buffers(context) if toll else None
    rates = exchange.COST_ON_CPU if context.on_host else exchange.COST_ON_DEVICE
    return ScalingSetup(
        before=before,
        on_host=context.on_host,
        links=tuple(_link(context, traced, ranks, before, said) for ranks in sorted(said)),
        ways=tuple(_way(context, gradients, *plan, places, toll) for plan in plans),
        retimed=keeps,
        finish_ns=rates.step_ns if toll else 0.0,
        sent_bytes=tuple(map(float, statistics.messages_bytes)) if statistics else (),
        send_ns=rates.bucket_ns,
        sent_ns=rates.tensor_ns * statistics.tensors if statistics else 0.0,
        moments=len(places),
        forward=places.index(("forward", 0)) if places else -1,
        places=tuple(places),
        traced=traced,
        rows=tuple(context.graph.tasks.row[traced.tasks].tolist()) if traced else (),
        no_buckets="" if gradients else "The trace does not give the gradients' sizes",
        no_share=_no_share(context),
        held_bytes=int(plans[0][1].size_bytes.sum()) if toll and plans else 0,
    )


def _tried(bench: Bench, before: int) -> dict[int, tuple[str, ...]]:
    """What is assumed about each number of workers, whatever their batch."""
    found: dict[int, tuple[str, ...]] = {before: ()}
    own = describe_batch(on_host=bench.context.on_host, strong=False)
    # The fewest that exchange something first: a reason names their number.
    for ranks in sorted({*WORKERS} - {before}, key=lambda ranks: (ranks < 2, ranks)):
        trial = bench.change(bench.begin(), Setting(name="workers", value=str(ranks)))
        if trial.refused:
            raise CannotScale(trial.refused[-1])
        found[ranks] = tuple(line for line in trial.assumptions if line != own)
    return found


def _no_share(context: StepContext) -> str:
    """Whatever the batch is."""
    try:
        share_of_batch(replace(context, batch=None), 1, 0.5)
    except Refused as reason:
        return str(reason)
    return ""


def _link(
    context: StepContext,
    traced: TracedExchange | None,
    ranks: int,
    before: int,
    said: dict[int, tuple[str, ...]],
) -> WorkerLink:
    straggling = find_straggling(context, ranks, before)
    found = find_link_times(context, traced, ranks)
    if found is None:
        return WorkerLink(
            ranks=ranks, straggling=straggling, spread=0.0, basis="none", said=said[ranks]
        )
    meets = found.contention if context.on_host else None
    return WorkerLink(
        ranks=ranks,
        straggling=straggling,
        spread=found.spread,
        basis=found.basis,
        all_reduce=_lines(found.lines["all_reduce"]),
        broadcast=_lines(found.lines["broadcast"]),
        beside=_lines(meets.beside) if meets else (),
        lost=meets.lost if meets else 0.0,
        said=said[ranks],
    )


def find_link_times(
    context: StepContext, traced: TracedExchange | None, ranks: int
) -> TransferTimes | None:
    if ranks < 2:
        return None
    return find_transfer_times(
        ranks,
        trace=context.trace,
        profiles=context.profiles,
        seen=traced.seen if traced else None,
        device=find_device(context.trace.device_name or ""),
        on_host=context.on_host,
    )


def _lines(segments: Sequence[Segment]) -> tuple[Line, ...]:
    return tuple((float(s.to_bytes), s.alpha_ns, s.beta_ns_per_byte) for s in segments)


# Buckets, and the moments at which they are ready

_Plan = tuple[float | None, "Buckets", str]


def _plans(traced: TracedExchange | None, gradients: Gradients | None) -> list[_Plan]:
    """Sizes that make other buckets than those before them; marks are the trace's or gradients'."""
    found: list[_Plan] = []
    if traced and traced.buckets:
        found.append((None, traced.buckets, "bucket"))
    if gradients is None:
        return found
    if not found:
        found.append((None, fill_buckets(gradients), "gradient"))
    usual = not (traced and traced.buckets)
    for size in BUCKETS_MB:
        if usual and size * _MB == CAP_BYTES:
            continue
        plan = fill_buckets(gradients, size * _MB, size * _MB)
        known = [np.array_equal(plan.size_bytes, each.size_bytes) for _, each, _ in found]
        if not any(known) and len(plan) <= _MOST_BUCKETS:
            found.append((float(size), plan, "gradient"))
    return found


def _places(
    graph: StepGraph,
    traced: TracedExchange | None,
    gradients: Gradients | None,
    plans: list[_Plan],
    keeps: bool,
) -> list[tuple[str, int]]:
    """Every moment by what it is: one of the gradients or of the trace's buckets becomes ready."""
    if not plans:
        return []
    calls: dict[tuple[str, int], int] = {}
    if traced and traced.buckets and not keeps:
        calls |= {("bucket", i): at for i, at in enumerate(traced.buckets.ready.tolist())}
    if gradients is not None:
        closing = {
            number
            for _, plan, kind in plans
            if kind == "gradient"
            for number in _closing(plan, gradients)
        }
        calls |= {("gradient", number): int(gradients.ready[number]) for number in closing}
    ready = sorted(calls, key=lambda place: calls[place])
    first = first_forward_call(graph)
    before = sum(calls[place] < first for place in ready)
    return [*ready[:before], ("forward", 0), *ready[before:], ("end", 0)]


def _way(
    context: StepContext,
    gradients: Gradients | None,
    size_mb: float | None,
    plan: Buckets,
    kind: str,
    places: list[tuple[str, int]],
    toll: bool,
) -> BucketLayout:
    sizes = plan.size_bytes.astype(np.float64)
    none = np.zeros(len(plan))
    rates = exchange.COST_ON_CPU if context.on_host else exchange.COST_ON_DEVICE
    host = rates.bucket_ns + rates.tensor_ns * plan.tensors.astype(np.float64)
    return BucketLayout(
        bucket_mb=size_mb,
        size_bytes=tuple(sizes.tolist()),
        marks=_marks(gradients, plan, kind, places),
        host_ns=tuple((host if toll else none).tolist()),
        fill_ns=tuple((_fill(context, sizes) if toll else none).tolist()),
    )


def _marks(
    gradients: Gradients | None, plan: Buckets, kind: str, places: list[tuple[str, int]]
) -> tuple[int, ...]:
    if kind == "bucket" or gradients is None:
        known = [("bucket", number) for number in range(len(plan))]
        return tuple(places.index(place) for place in known) if known[0] in places else ()
    return tuple(places.index(("gradient", number)) for number in _closing(plan, gradients))


def _closing(plan: Buckets, gradients: Gradients) -> list[int]:
    """The gradient that closes each bucket; of several types, the last that is ready then."""
    ends: list[int] = (np.cumsum(plan.tensors) - 1).tolist()
    if len(np.unique(gradients.dtype)) == 1:
        return ends
    last = {at: number for number, at in enumerate(gradients.ready.tolist())}
    return [last[at] for at in plan.ready.tolist()]


def first_forward_call(graph: StepGraph) -> int:
    forward = np.flatnonzero(graph.calls.phase == Phase.FORWARD)
    return int(forward.min(initial=len(graph.calls)))


def _fill(context: StepContext, sizes: np.ndarray) -> np.ndarray:
    """Gradients into their bucket: read once, written once."""
    if context.on_host:
        return 2 * sizes / exchange.COST_ON_CPU.copied_bytes_s * 1e9
    if context.ceilings is None:
        return np.full(len(sizes), FLOOR_NS)
    return copy_ns(2 * sizes, context.ceilings)
