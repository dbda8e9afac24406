"""When gradients are ready and buckets exchanged: measured, and predicted for other bucket
sizes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from stepscope.fix.ddp.gradient_exchange import (
    BucketSizes,
    bucket_indices,
    own_hook,
    round_robin_hook,
)

if TYPE_CHECKING:
    from stepscope.fix.ddp.gradient_exchange import Hook
# The link is a queue: a bucket starts when its last gradient is ready and the bucket before it is
# done, and takes `per_bucket_ns + per_byte_ns x bytes`. Both numbers are fitted to stretches of
# time in which the link never pauses: a stretch of n buckets with b bytes lasts n alpha + b beta,
# even if gloo works on two buckets at a time.


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTimes:
    """One bucket, in ns from the start of the step on the slowest rank."""

    size_bytes: int
    ready_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTimeline:
    """The buckets of one backward pass, in the order in which they are exchanged."""

    buckets: tuple[BucketTimes, ...]
    backward_end_ns: int

    @property
    def end_ns(self) -> int:
        return max((bucket.end_ns for bucket in self.buckets), default=self.backward_end_ns)

    @property
    def exposed_ns(self) -> int:
        """How long the exchange goes on after the last gradient."""
        return max(0, self.end_ns - self.backward_end_ns)

    @property
    def busy_ns(self) -> int:
        """How long at least one bucket is exchanged."""
        return sum(stretch.lasts_ns for stretch in _stretches(self))

    @property
    def overlap(self) -> float | None:
        """The share of the exchange that runs during backward; None if nothing is exchanged."""
        return 1 - min(self.exposed_ns, self.busy_ns) / self.busy_ns if self.busy_ns else None

    def exposed_by_bucket(self) -> list[int]:
        """Return what each bucket adds to the time after backward; it adds up to exposed_ns."""
        ends = accumulate((bucket.end_ns for bucket in self.buckets), max)
        edges = [self.backward_end_ns, *(max(end, self.backward_end_ns) for end in ends)]
        return [after - before for before, after in pairwise(edges)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCosts:
    """The cost of an exchange on this link."""

    per_bucket_ns: float
    per_byte_ns: float


def fit_costs(timelines: Iterable[ExchangeTimeline]) -> ExchangeCosts | None:
    """The costs with the least relative error, none of them negative; None without exchanges."""
    stretches = [stretch for timeline in timelines for stretch in _stretches(timeline)]
    stretches = [stretch for stretch in stretches if stretch.lasts_ns > 0]
    if not stretches:
        return None
    rows = [(one.buckets / one.lasts_ns, one.size_bytes / one.lasts_ns) for one in stretches]
    nn, nb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    n, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = nn * bb - nb * nb
    only_bytes = ExchangeCosts(per_bucket_ns=0.0, per_byte_ns=b / bb if bb else 0.0)
    if determinant <= 1e-9 * nn * bb:
        return only_bytes  # all stretches alike: nothing tells the two costs apart
    alpha, beta = (n * bb - b * nb) / determinant, (b * nn - n * nb) / determinant
    if alpha < 0:
        return only_bytes
    if beta < 0:
        return ExchangeCosts(per_bucket_ns=n / nn, per_byte_ns=0.0)
    return ExchangeCosts(per_bucket_ns=alpha, per_byte_ns=beta)


def predict_timeline(
    sizes_bytes: Sequence[int], ready_ns: Sequence[int], costs: ExchangeCosts, backward_end_ns: int
) -> ExchangeTimeline:
    """Buckets in the order given: DDP never starts one before those in front of it."""
    buckets, free_ns = [], 0
    for size, ready in zip(sizes_bytes, accumulate(ready_ns, max), strict=True):
        lasts = costs.per_bucket_ns + costs.per_byte_ns * size
        free_ns = round(max(ready, free_ns) + lasts)
        buckets.append(BucketTimes(size_bytes=size, ready_ns=ready, end_ns=free_ns))
    return ExchangeTimeline(buckets=tuple(buckets), backward_end_ns=backward_end_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """A time in which the link never pauses."""

    buckets: int
    size_bytes: int
    lasts_ns: int


def _stretches(timeline: ExchangeTimeline) -> list[_Stretch]:
    groups: list[list[BucketTimes]] = []
    end_ns = -1
    for bucket in sorted(timeline.buckets, key=lambda bucket: bucket.ready_ns):
        if bucket.ready_ns > end_ns:
            groups.append([])
        groups[-1].append(bucket)
        end_ns = max(end_ns, bucket.end_ns)
    return [
        _Stretch(
            buckets=len(group),
            size_bytes=sum(bucket.size_bytes for bucket in group),
            lasts_ns=max(bucket.end_ns for bucket in group) - group[0].ready_ns,
        )
        for group in groups
    ]


# When each gradient of a step is ready, and when each bucket was exchanged.
#
# All ranks meet before the step, so that their times count from the same moment. A gradient is
# ready when the slowest rank has it, and a bucket is done when the slowest rank has its sum.

_NEVER = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step: when each parameter's gradient is ready, and the exchange."""

    ready_ns: tuple[int, ...]
    timeline: ExchangeTimeline


class GradientTimer:
    """Times the steps between `begin` and `end`, on a DDP whose hook is `hook`."""

    def __init__(self, ddp: Any, parameters: Sequence[Any], agree: RanksAgree) -> None:
        self._parameters, self._agree = parameters, agree
        self._device, self._on_cuda = parameters[0].device, parameters[0].is_cuda
        plain: tuple[Any, Hook] = (None, round_robin_hook([ddp.process_group]))
        self._state, self._exchange = own_hook(ddp) or plain
        self._handles: list[Any] = []
        self._origin: Any = None
        self._ready: dict[int, Any] = {}
        self._buckets: list[tuple[int, Any, list[Any]]] = []  # bytes, ready, and the end

    @property
    def hook(self) -> tuple[Any, Hook]:
        """Exchanges buckets as the DDP does, and notes when."""

        def exchange_timed(state: Any, bucket: Any) -> Any:
            if bucket.index() == 0:
                self._buckets = []  # an earlier pass of the same step
            ended: list[Any] = []
            self._buckets.append((bucket.buffer().nbytes, self._mark(), ended))

            def end(done: Any) -> Any:
                ended.append(self._mark())
                return done.value()

            return self._exchange(state, bucket).then(end)

        return self._state, exchange_timed

    def begin(self) -> None:
        self._agree.meet()
        self._ready, self._buckets = {}, []
        for place, parameter in enumerate(self._parameters):
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(
                    lambda _parameter, place=place: self._ready.update({place: self._mark()})
                )
            )
        self._origin = self._mark()

    def end(self) -> TimedStep:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        wait_for_device(self._parameters[0])
        own = [self._ns(self._ready.get(place)) for place in range(len(self._parameters))]
        ready = self._agree.largest(own)
        times = [(self._ns(ready), self._ns(end[0])) for _, ready, end in self._buckets]
        flat = self._agree.largest([ns for pair in times for ns in pair])
        last = max(*ready, 0.0)
        # A parameter that no rank has used goes with the last ones.
        ready = [last if ns == _NEVER else ns for ns in ready]
        buckets = tuple(
            BucketTimes(size_bytes=size, ready_ns=round(start), end_ns=round(end))
            for (size, _, _), start, end in zip(self._buckets, flat[::2], flat[1::2], strict=True)
        )
        return TimedStep(
            ready_ns=tuple(round(ns) for ns in ready),
            timeline=ExchangeTimeline(buckets=buckets, backward_end_ns=round(last)),
        )

    def _mark(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter_ns()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _ns(self, mark: Any) -> float:
        if mark is None:
            return _NEVER
        if self._on_cuda:
            return float(self._origin.elapsed_time(mark) * 1e6)
        return float(mark - self._origin)


def wait_for_device(parameter: Any) -> None:
    """Until the work that was queued for a parameter's device is done."""
    if parameter.is_cuda:
        import torch

        torch.cuda.synchronize(parameter.device)


# Bucket sizes that are worth a trial, by what they are predicted to leave exposed.

_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)  # of buckets
_FIRST = (1, 4, 16)  # parts of a bucket that the first one holds
_SMALLEST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Bucket sizes and the exchange that they are predicted to give."""

    sizes: BucketSizes
    predicted: ExchangeTimeline

    @property
    def buckets_bytes(self) -> tuple[int, ...]:
        return tuple(bucket.size_bytes for bucket in self.predicted.buckets)


def predict_sizes(
    parameters: Sequence[Any], ready_ns: Sequence[int], sizes: BucketSizes, costs: ExchangeCosts
) -> Candidate:
    """The parameters and their ready times are in the order of the buckets."""
    indices = bucket_indices(parameters, sizes)
    predicted = predict_timeline(
        [sum(parameters[place].nbytes for place in bucket) for bucket in indices],
        [max(ready_ns[place] for place in bucket) for bucket in indices],
        costs,
        max(ready_ns),
    )
    return Candidate(sizes=sizes, predicted=predicted)


def best_candidates(
    parameters: Sequence[Any],
    ready_ns: Sequence[int],
    present: BucketSizes,
    costs: ExchangeCosts,
    most: int,
) -> list[Candidate]:
    """Layouts that differ from the present one, the most promising first.

    Among layouts with about as many buckets only the best is kept: the prediction tells them apart
    less well than it tells few buckets from many.
    """
    known = {predict_sizes(parameters, ready_ns, present, costs).buckets_bytes}
    by_count: dict[int, Candidate] = {}
    all_bytes = sum(parameter.nbytes for parameter in parameters)
    caps = [max(_SMALLEST, math.ceil(all_bytes / count)) for count in _COUNTS]
    for sizes in [
        BucketSizes(first_bytes=max(_SMALLEST, cap // part), cap_bytes=cap)
        for cap in dict.fromkeys(caps)
        for part in _FIRST
    ]:
        candidate = predict_sizes(parameters, ready_ns, sizes, costs)
        if candidate.buckets_bytes in known:
            continue
        known.add(candidate.buckets_bytes)
        about = round(2 * math.log2(len(candidate.buckets_bytes)))
        best = by_count.setdefault(about, candidate)
        if candidate.predicted.exposed_ns < best.predicted.exposed_ns:
            by_count[about] = candidate
    return sorted(by_count.values(), key=lambda one: one.predicted.exposed_ns)[:most]


# Numbers that all ranks of a group share.


class RanksAgree:
    """Every rank calls the same methods in the same order, with as many numbers as the others."""

    def __init__(self, group: Any, device: Any) -> None:
        self._group, self._device = group, device

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Each number as it is on the rank where it is largest."""
        import torch
        import torch.distributed as dist

        if not numbers:
            return []
        tensor = torch.tensor(list(numbers), dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return list(tensor.tolist())

    def of_first(self, numbers: Sequence[float]) -> list[float]:
        """The numbers of the group's first rank."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(list(numbers), dtype=torch.float64, device=self._device)
        dist.broadcast(tensor, dist.get_global_rank(self._group, 0), group=self._group)
        return list(tensor.tolist())

    def meet(self) -> None:
        """Wait until every rank is here."""
        self.largest([0.0])
