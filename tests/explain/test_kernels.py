"""Kernels, launches and copies of a rank."""

from __future__ import annotations

import pytest

from .build import WORKER, call, frame, graph, kernel, memcpy, memset, note, op
from .conftest import Explain

# Device time by kernel name.


def test_kernels_of_one_name_are_one_row_longest_total_first(explained: Explain) -> None:
    rank = explained(
        kernel("gemm", start=0, dur=10),
        kernel("relu", start=10, dur=3),
        kernel("gemm", start=13, dur=4, stream=9),
        memcpy("Memcpy HtoD", start=20, dur=5),
        kernel("ncclDevKernel_AllReduce", start=30, dur=6),
    )
    rows = [(k.name, k.kind, k.count, k.total_ns, k.min_ns, k.max_ns) for k in rank.kernels]
    assert rows == [
        ("gemm", "compute", 2, 14_000, 4_000, 10_000),
        ("ncclDevKernel_AllReduce", "comm", 1, 6_000, 6_000, 6_000),
        ("Memcpy HtoD", "memory", 1, 5_000, 5_000, 5_000),
        ("relu", "compute", 1, 3_000, 3_000, 3_000),
    ]


def test_totals_are_sums_even_where_kernels_overlap(explained: Explain) -> None:
    rank = explained(
        kernel("gemm", start=0, dur=10, stream=7), kernel("gemm", start=5, dur=10, stream=8)
    )
    assert rank.timeline.compute_ns == 15_000
    assert rank.kernels[0].total_ns == 20_000


def test_without_a_device_an_operators_own_time_takes_a_kernels_place(explained: Explain) -> None:
    # linear 0-10 [t 1-2, addmm 3-9]; Python between operators is nobody's kernel, Python inside
    # one (a custom function 4-8) is still the operator's
    rank = explained(
        op("aten::linear", start=0, dur=10),
        op("aten::t", start=1, dur=1),
        op("aten::addmm", start=3, dur=6),
        frame("train.py(3): custom", start=4, dur=4),
        frame("train.py(1): main", start=-5, dur=100),
        device=None,
    )
    rows = {k.name: (k.count, k.total_ns) for k in rank.kernels}
    assert rows == {"aten::linear": (1, 3_000), "aten::t": (1, 1_000), "aten::addmm": (1, 6_000)}
    assert sum(k.total_ns for k in rank.kernels) == rank.timeline.compute_ns


def test_without_a_device_all_inside_a_communication_span_is_communication(
    explained: Explain,
) -> None:
    rank = explained(
        op("aten::copy_", start=0, dur=10),
        note("gloo:all_gather", start=20, dur=8, thread=WORKER),
        op("aten::copy_", start=22, dur=3, thread=WORKER),
        device=None,
    )
    rows = {(k.name, k.kind): k.total_ns for k in rank.kernels}
    assert rows == {
        ("aten::copy_", "compute"): 10_000,
        ("gloo:all_gather", "comm"): 5_000,
        ("aten::copy_", "comm"): 3_000,
    }


def test_kernels_of_the_steps_leave_out_what_the_window_opened_on(explained: Explain) -> None:
    # gemm at 0: left over by an earlier step, its launch not recorded; the step is 90-200, and the
    # kernel behind it was launched outside of it; one without a launch ran among the step's
    rank = explained(
        kernel("gemm", start=0, dur=50, launched_at=None),
        note("ProfilerStep#3", start=90, dur=110),
        kernel("gemm", start=110, dur=20, launched_at=100),
        kernel("relu", start=130, dur=7, launched_at=None),
        kernel("gemm", start=220, dur=30, launched_at=210),
    )
    rows = {k.name: (k.count, k.total_ns, k.steps_count, k.steps_ns) for k in rank.kernels}
    assert rows == {"gemm": (3, 100_000, 1, 20_000), "relu": (1, 7_000, 1, 7_000)}


def test_without_steps_nobody_knows_which_kernels_are_theirs(explained: Explain) -> None:
    rank = explained(kernel("gemm", start=110, dur=20, launched_at=100))
    assert (rank.kernels[0].steps_count, rank.kernels[0].steps_ns) == (None, None)


# How work got to the device: links, latency, queue, short kernels.


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


# Copies and memsets by name.


def test_copies_of_one_name_add_up_with_their_rate(explained: Explain) -> None:
    (copy,) = explained(
        memcpy("Memcpy HtoD", start=0, dur=2, bytes=8_000),
        memcpy("Memcpy HtoD", start=5, dur=3, bytes=2_000),
    ).copies
    assert (copy.count, copy.total_ns, copy.size_bytes) == (2, 5_000, 10_000)
    assert copy.gb_s == 2.0  # 10 kB in 5 µs


def test_exposed_time_is_what_neither_compute_nor_communication_hides(explained: Explain) -> None:
    # copy 0-10 under compute 0-4 and NCCL 6-8: exposed 4-6 and 8-10
    (copy,) = explained(
        memcpy(start=0, dur=10, stream=9, bytes=1),
        kernel("gemm", start=0, dur=4),
        kernel("ncclDevKernel_AllGather", start=6, dur=2, stream=20),
    ).copies
    assert copy.exposed_ns == 4_000


def test_one_copy_of_unknown_size_leaves_the_rate_unknown(explained: Explain) -> None:
    (copy,) = explained(
        memcpy("Memcpy HtoD", start=0, dur=2, bytes=8_000), memcpy("Memcpy HtoD", start=5, dur=3)
    ).copies
    assert copy.size_bytes is None
    assert copy.gb_s is None


def test_a_copy_of_no_length_has_no_rate(explained: Explain) -> None:
    (copy,) = explained(memset(start=0, dur=0, bytes=512)).copies
    assert (copy.count, copy.total_ns, copy.gb_s) == (1, 0, None)


def test_longest_total_comes_first(explained: Explain) -> None:
    copies = explained(
        memset(start=0, dur=1, bytes=1),
        memcpy("Memcpy DtoH", start=1, dur=5, bytes=1),
        memcpy("Memcpy HtoD", start=6, dur=3, bytes=1),
    ).copies
    assert [copy.name for copy in copies] == ["Memcpy DtoH", "Memcpy HtoD", "Memset (Device)"]


def test_without_a_device_there_are_no_copies(explained: Explain) -> None:
    assert explained(op("aten::copy_", start=0, dur=5), device=None).copies == ()
