"""Bucket sizes that are worth a trial, by what they are predicted to leave exposed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepscope.fix.ddp.exchange_timeline import ExchangeTimeline, predict_timeline
from stepscope.fix.ddp.reducer import BucketSizes, bucket_indices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.fix.ddp.exchange_timeline import ExchangeCosts

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
    for sizes in _possible_sizes(sum(parameter.nbytes for parameter in parameters)):
        candidate = predict_sizes(parameters, ready_ns, sizes, costs)
        if candidate.buckets_bytes in known:
            continue
        known.add(candidate.buckets_bytes)
        about = round(2 * math.log2(len(candidate.buckets_bytes)))
        best = by_count.setdefault(about, candidate)
        if candidate.predicted.exposed_ns < best.predicted.exposed_ns:
            by_count[about] = candidate
    return sorted(by_count.values(), key=lambda one: one.predicted.exposed_ns)[:most]


def _possible_sizes(all_bytes: int) -> list[BucketSizes]:
    caps = [max(_SMALLEST, math.ceil(all_bytes / count)) for count in _COUNTS]
    return [
        BucketSizes(first_bytes=max(_SMALLEST, cap // part), cap_bytes=cap)
        for cap in dict.fromkeys(caps)
        for part in _FIRST
    ]
