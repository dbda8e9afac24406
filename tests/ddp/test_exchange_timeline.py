"""The exchange of buckets as a queue, by hand-made times."""

from __future__ import annotations

import pytest

from stepscope.fix.ddp.bucket_tuner import TriedBuckets, TuningResult, choose_fastest
from stepscope.fix.ddp.exchange_timeline import (
    BucketTimes,
    ExchangeCosts,
    ExchangeTimeline,
    fit_costs,
    predict_timeline,
)
from stepscope.fix.ddp.gradient_exchange import BucketSizes

COSTS = ExchangeCosts(per_bucket_ns=1_000.0, per_byte_ns=2.0)


def test_a_bucket_waits_for_its_gradients_and_for_the_bucket_before_it() -> None:
    timeline = predict_timeline([500, 1_000, 100], [1_000, 2_000, 10_000], COSTS, 10_000)
    assert [bucket.end_ns for bucket in timeline.buckets] == [3_000, 6_000, 11_200]
    assert timeline.exposed_ns == 1_200
    assert timeline.busy_ns == 5_000 + 1_200
    assert timeline.overlap == pytest.approx(5_000 / 6_200)
    assert timeline.exposed_by_bucket() == [0, 0, 1_200]


def test_exposed_parts_add_up_even_if_buckets_end_out_of_order() -> None:
    ends = (4_000, 9_000, 8_000, 12_000)
    buckets = tuple(BucketTimes(size_bytes=1, ready_ns=0, end_ns=end) for end in ends)
    timeline = ExchangeTimeline(buckets=buckets, backward_end_ns=7_000)
    assert timeline.exposed_by_bucket() == [0, 2_000, 0, 3_000]
    assert sum(timeline.exposed_by_bucket()) == timeline.exposed_ns


def test_costs_are_found_again() -> None:
    layouts = ([4_000], [1_000] * 4, [100, 3_900])
    timelines = [predict_timeline(sizes, [0] * len(sizes), COSTS, 0) for sizes in layouts]
    costs = fit_costs(timelines)
    assert costs is not None
    assert costs.per_bucket_ns == pytest.approx(1_000)
    assert costs.per_byte_ns == pytest.approx(2.0)


def test_two_buckets_at_a_time_cost_what_the_stretch_costs() -> None:
    """Both run from 0 to 6,000: 2 x 1,000 for the buckets, 4,000 for 2,000 bytes."""
    pair = ExchangeTimeline(
        buckets=(
            BucketTimes(size_bytes=1_000, ready_ns=0, end_ns=5_900),
            BucketTimes(size_bytes=1_000, ready_ns=100, end_ns=6_000),
        ),
        backward_end_ns=100,
    )
    costs = fit_costs([pair, predict_timeline([2_000], [0], COSTS, 0)])
    assert costs is not None
    assert costs.per_bucket_ns == pytest.approx(1_000)
    assert costs.per_byte_ns == pytest.approx(2.0)


def test_costs_are_never_negative_and_not_known_without_an_exchange() -> None:
    falling = [
        predict_timeline([1_000], [0], ExchangeCosts(per_bucket_ns=9_000, per_byte_ns=0), 0),
        predict_timeline([9_000], [0], ExchangeCosts(per_bucket_ns=5_000, per_byte_ns=0), 0),
    ]
    costs = fit_costs(falling)
    assert costs is not None
    assert costs.per_byte_ns == 0
    assert 5_000 < costs.per_bucket_ns < 9_000
    assert fit_costs([]) is None
    nothing = ExchangeTimeline(buckets=(), backward_end_ns=5)
    assert fit_costs([nothing]) is None
    assert nothing.overlap is None


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        ([[100, 101, 102], [90, 91, 99]], 1),
        ([[100, 101, 102], [100.5, 99.5, 100.5]], 0),  # half a percent is nothing
        ([[100, 101, 102], [90, 91, 103]], 0),  # a tenth or less, and not in every round
        ([[100, 101, 102], [80, 81, 103]], 1),  # a fifth: one round was lost to something else
        ([[79, 101, 102], [80, 81, 103]], 0),  # the script's own was faster at its best
        ([[100, 101, 102], [90, 95, 96], [92, 93, 94]], 2),
    ],
)
def test_only_a_clear_winner_stays(turns: list[list[float]], kept: int) -> None:
    assert choose_fastest(turns, own=0) == kept


def test_the_report_names_sizes_times_and_the_call_for_next_time() -> None:
    before = BucketSizes(first_bytes=1 << 20, cap_bytes=25 << 20)
    after = BucketSizes(first_bytes=1 << 18, cap_bytes=1 << 19)
    timeline = predict_timeline([10_000] * 20, range(0, 20_000, 1_000), COSTS, 20_000)
    tried = TriedBuckets(sizes=after, buckets=1, predicted_ns=2e6, measured_ns=3e6)
    result = TuningResult(
        steps=55,
        before=before,
        after=after,
        before_ns=6e6,
        after_ns=3e6,
        costs=COSTS,
        before_timeline=timeline,
        after_timeline=timeline,
        tried=(tried,),
    )
    text = str(result)
    assert "buckets of 256 KiB, then 512 KiB instead of 1 MiB, then 25 MiB" in text
    assert "a step takes 3.00 ms instead of 6.00 ms" in text
    assert "a bucket costs 1.00 µs, then 500 MB/s" in text
    assert text.count("... 8 more") == 2
    assert "tried 256 KiB, then 512 KiB (1 bucket): predicted 2.00 ms per step" in text
    assert "set_buckets(ddp, cap_bytes=524288, first_bytes=262144)" in text
