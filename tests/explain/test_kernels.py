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
