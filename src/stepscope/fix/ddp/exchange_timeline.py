"""When buckets are exchanged, as measured, and as predicted for other buckets.

The link is a queue: a bucket starts when its last gradient is ready and the bucket before it is
done, and takes `per_bucket_ns + per_byte_ns x bytes`. Both numbers are fitted to stretches of time
in which the link never pauses: a stretch of n buckets with b bytes lasts n alpha + b beta, even
if gloo works on two buckets at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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
        """What each bucket adds to the time after backward; the parts add up to exposed_ns."""
        ends = accumulate((bucket.end_ns for bucket in self.buckets), max)
        edges = [self.backward_end_ns, *(max(end, self.backward_end_ns) for end in ends)]
        return [after - before for before, after in pairwise(edges)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCosts:
    """What an exchange costs on this link."""

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
