"""How work got to the device: links, latency, queue, short kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .build import call, graph, kernel, memcpy, op

if TYPE_CHECKING:
    from .conftest import Explain


def test_calls_and_their_host_time_count_once_a_graph(explained: Explain) -> None:
    launches = explained(
        kernel("a", start=0, dur=5, launched_at=-9, launch_dur=3),
        graph(
            [kernel("n1", start=10, dur=2), memcpy(start=13, dur=2), kernel("n2", start=16, dur=2)],
            launched_at=-5,
            launch_dur=4,
        ),
        kernel("early", start=30, dur=7),
    ).launches
    assert (launches.device_events, launches.linked, launches.unlinked) == (5, 4, 1)
    assert launches.unlinked_ns == 7_000
    assert (launches.calls, launches.call_ns) == (2, 7_000)
    assert launches.kernels == 4
    assert launches.graph_kernels == 2  # the graph's copy is no kernel


def test_latency_is_taken_only_where_the_stream_was_free(explained: Explain) -> None:
    # a: first on its stream, 5 µs; b: launched while a ran, says nothing; c: 8 µs; d on another
    # stream that is free: 11 µs
    launches = explained(
        kernel("a", start=5, dur=20, launched_at=0),
        kernel("b", start=26, dur=4, launched_at=10),
        kernel("c", start=48, dur=4, launched_at=40),
        kernel("d", start=22, dur=4, launched_at=11, stream=9),
    ).launches
    assert launches.latency_p50_ns == 8_000
    assert launches.latency_p90_ns == pytest.approx(10_400)  # between 8 and 11


def test_queue_counts_what_was_launched_and_has_not_begun(explained: Explain) -> None:
    # launched  a 0, b 2, c 4       started  a 1, b 11, c 21       the last ends at 31
    # waiting   0-1: a | 1-2: none | 2-4: b | 4-11: b, c | 11-21: c | 21-31: none
    launches = explained(
        kernel("a", start=1, dur=10, launched_at=0),
        kernel("b", start=11, dur=10, launched_at=2),
        kernel("c", start=21, dur=10, launched_at=4),
    ).launches
    assert launches.queue_max == 2
    assert launches.queue_mean == pytest.approx((1 + 0 + 2 + 14 + 10) / 31)
    assert launches.queue_empty_share == pytest.approx(11 / 31)


def test_short_kernels_are_below_ten_microseconds(explained: Explain) -> None:
    launches = explained(
        kernel("a", start=0, dur=9.999),
        kernel("b", start=20, dur=10),
        memcpy(start=40, dur=1),
    ).launches
    assert (launches.kernels, launches.short_kernels, launches.short_kernels_ns) == (2, 1, 9_999)


def test_what_was_never_linked_has_no_latency_and_no_queue(explained: Explain) -> None:
    launches = explained(kernel("a", start=0, dur=5)).launches
    assert launches.latency_p50_ns is None
    assert launches.queue_mean is None
    assert launches.queue_empty_share is None


def test_without_a_device_nothing_was_launched(explained: Explain) -> None:
    launches = explained(op("aten::mm", start=0, dur=5), device=None).launches
    assert (launches.device_events, launches.calls, launches.queue_max) == (0, 0, None)


def test_of_two_calls_with_one_correlation_the_earlier_launched(explained: Explain) -> None:
    rank = explained(
        kernel("a", start=0, dur=10, launched_at=-5),
        kernel("b", start=50, dur=1, correlation=900),
        call("cuLaunchKernel", start=42, dur=1, correlation=900),
        call("cudaLaunchKernel", start=40, dur=5, correlation=900),
    )
    assert rank.launches.latency_p50_ns == (5_000 + 10_000) // 2
