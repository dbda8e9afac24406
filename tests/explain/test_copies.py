"""Copies and memsets by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .build import kernel, memcpy, memset, op

if TYPE_CHECKING:
    from .conftest import Explain


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
