"""What a bucket tuner found, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.records.figures import byte_rate, duration, factor, percent, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.fix.ddp.exchange_timeline import ExchangeCosts, ExchangeTimeline
    from stepscope.fix.ddp.reducer import BucketSizes

_FIRST_ROWS, _LAST_ROWS = 3, 9  # of a table of buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedBuckets:
    """Bucket sizes that were tried on real steps."""

    sizes: BucketSizes
    buckets: int
    predicted_ns: float
    measured_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """What the training had before, what it has now, and why."""

    steps: int
    before: BucketSizes
    after: BucketSizes | None  # None: those of before
    before_ns: float | None  # a step; None where nothing else was worth a trial
    after_ns: float | None
    costs: ExchangeCosts | None
    before_timeline: ExchangeTimeline
    after_timeline: ExchangeTimeline
    tried: tuple[TriedBuckets, ...]

    @property
    def is_changed(self) -> bool:
        return self.after is not None

    @property
    def verdict(self) -> str:
        if self.costs is None:
            return f"buckets stay at {self.before}: the timed steps exchanged no gradients"
        if self.before_ns is None or self.after_ns is None:
            return f"buckets stay at {self.before}: other sizes would give the same buckets"
        if not self.is_changed:
            others = f"{len(self.tried)} others were" if len(self.tried) > 1 else "1 other was"
            return f"buckets stay at {self.before}: {others} tried and not clearly faster"
        gain = factor(self.before_ns / self.after_ns)
        other = f"instead of {self.before}"
        if self.after == self.before:
            other = "in the order in which gradients become ready"
        return (
            f"buckets of {self.after} {other}: a step takes {duration(self.after_ns)} instead "
            f"of {duration(self.before_ns)} ({gain})"
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"stepscope: {self.verdict}"
        yield f"  the tuning took {self.steps} steps"
        if self.costs is not None:
            yield f"  {_words(self.costs)}"
        yield from _table("before", self.before, self.before_timeline)
        if self.after is not None:
            yield from _table("now", self.after, self.after_timeline)
        for one in self.tried:
            buckets = "1 bucket" if one.buckets == 1 else f"{one.buckets} buckets"
            yield (
                f"  tried {one.sizes} ({buckets}): predicted {duration(one.predicted_ns)} per "
                f"step, measured {duration(one.measured_ns)}"
            )
        if self.after is not None:
            yield f"  next time, without tuning: {_call(self.after)}"


def _words(costs: ExchangeCosts) -> str:
    rate = f", then {byte_rate(1e9 / costs.per_byte_ns)}" if costs.per_byte_ns > 0 else ""
    return f"a bucket costs {duration(costs.per_bucket_ns)}{rate}"


def _call(sizes: BucketSizes) -> str:
    arguments = f"cap_bytes={sizes.cap_bytes}, first_bytes={sizes.first_bytes}"
    return f"stepscope.fix.ddp.set_buckets(ddp, {arguments})"


def _table(name: str, sizes: BucketSizes, timeline: ExchangeTimeline) -> Iterator[str]:
    overlap = timeline.overlap
    hidden = (
        "" if overlap is None else f", {percent(overlap)} of the exchange overlaps with compute"
    )
    yield (
        f"  {name}: {sizes}. The last gradient is ready after "
        f"{duration(timeline.backward_end_ns)}, the last bucket is done "
        f"{duration(timeline.exposed_ns)} later{hidden}"
    )
    exposed = timeline.exposed_by_bucket()
    for place, (bucket, exposed_ns) in enumerate(zip(timeline.buckets, exposed, strict=True)):
        left_out = len(timeline.buckets) - _FIRST_ROWS - _LAST_ROWS
        if place == _FIRST_ROWS and left_out > 1:
            yield f"    ... {left_out} more"
        if _FIRST_ROWS <= place < _FIRST_ROWS + left_out and left_out > 1:
            continue
        yield (
            f"    bucket {place:>3}: {size(bucket.size_bytes):>8}, ready "
            f"{duration(bucket.ready_ns):>8}, done {duration(bucket.end_ns):>8}, exposed "
            f"{duration(exposed_ns):>8}"
        )
