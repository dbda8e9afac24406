"""Blocking calls: what waited, in which operator, called from where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .build import call, frame, kernel, op

if TYPE_CHECKING:
    from stepscope.records.explanation import RankExplanation

    from .conftest import Explain


def rows(rank: RankExplanation) -> list[tuple[str, str, int, int, str | None, int | None]]:
    return [(s.name, s.operator, s.count, s.total_ns // 1000, s.file, s.line) for s in rank.syncs]


def test_calls_of_one_operator_are_one_row(explained: Explain) -> None:
    rank = explained(
        kernel("k", start=0, dur=1),
        op("aten::item", start=0, dur=20),
        op("aten::_local_scalar_dense", start=1, dur=18),
        call("cudaStreamSynchronize", start=2, dur=10),
        op("aten::_local_scalar_dense", start=30, dur=18),
        call("cudaStreamSynchronize", start=32, dur=7),
        call("cudaDeviceSynchronize", start=60, dur=30),
    )
    assert rows(rank) == [
        ("cudaDeviceSynchronize", "", 1, 30, None, None),
        ("cudaStreamSynchronize", "aten::_local_scalar_dense", 2, 17, None, None),
    ]


def test_each_place_in_the_code_is_a_row_of_its_own(explained: Explain) -> None:
    """The costly place is named even where a cheap one of the same operator came first."""
    rank = explained(
        kernel("k", start=0, dur=1),
        frame("train.py(10): warm_up", start=0, dur=20),
        op("aten::item", start=1, dur=15),
        call("cudaStreamSynchronize", start=2, dur=3),
        frame("train.py(40): log", start=30, dur=60),
        frame("torch/_tensor.py(1): __format__", start=31, dur=58),
        op("aten::item", start=32, dur=55),
        call("cudaStreamSynchronize", start=33, dur=50),
    )
    assert rows(rank) == [
        ("cudaStreamSynchronize", "aten::item", 1, 50, "train.py", 40),
        ("cudaStreamSynchronize", "aten::item", 1, 3, "train.py", 10),
    ]


def test_calls_that_do_not_wait_are_not_listed(explained: Explain) -> None:
    rank = explained(
        kernel("k", start=10, dur=1, launched_at=0),
        call("cudaMemcpyAsync", start=2, dur=3),
        call("cudaEventRecord", start=6, dur=1),
    )
    assert rank.syncs == ()
