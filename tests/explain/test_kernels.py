"""Device time by kernel name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .build import WORKER, frame, kernel, memcpy, note, op

if TYPE_CHECKING:
    from .conftest import Explain


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
