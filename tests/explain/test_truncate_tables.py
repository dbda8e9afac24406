"""Short tables: the longest rows stay, and every column adds up to what it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stepscope.explain.rank import OTHERS, explain_rank, truncate_tables
from stepscope.records.explanation import RankExplanation
from stepscope.records.memory import Memory, ModuleBytes, SiteBytes
from stepscope.trace.read import read_trace

from .build import call, frame, kernel, memcpy, nccl, op, write

TABLES = ("kernels", "operators", "modules", "lines", "syncs", "collectives")


@pytest.fixture
def rank(tmp_path: Path) -> RankExplanation:
    """Six rows or more in every table."""
    events = []
    for n in range(6):
        at = 1000 * n
        events += [
            frame(f"train.py({n}): step_{n}", start=at, dur=900),
            frame(f"nn.Module: Block_{n}", start=at + 10, dur=700),
            op(f"aten::op{n}", start=at + 20, dur=100 + n),
            kernel(f"gemm{n}", start=at + 50, dur=10 * (n + 1), launched_at=at + 30),
            memcpy(f"Memcpy {n}", start=at + 200, dur=5 + n, launched_at=at + 40),
            op(
                "aten::mm",
                start=at + 130,
                dur=30,
                shapes=[[64, 64], [64, 64 + n]],
                dtypes=["float", "float"],
            ),
            kernel(f"matmul{n}", start=at + 300, dur=20 + n, launched_at=at + 140),
            op(f"aten::item{n}", start=at + 800, dur=20),
            call("cudaStreamSynchronize", start=at + 805, dur=10 + n),
            kernel(
                "ncclDevKernel_AllReduce",
                start=at + 400,
                dur=40 + n,
                stream=20,
                launched_at=at + 60,
                **nccl("allreduce", in_elements=10 + n, out_elements=10 + n),
            ),
        ]
    return explain_rank(read_trace(write(tmp_path / "a.json", *events)))


def sums(rows: tuple[Any, ...]) -> dict[str, int]:
    names = [n for n in rows[0].__struct_fields__ if n.endswith("_ns") or n in ("count", "calls")]
    names = [n for n in names if getattr(rows[0], n) is not None]
    return {n: sum(getattr(row, n) for row in rows) for n in names if n not in ("min_ns", "max_ns")}


@pytest.mark.parametrize("table", TABLES)
def test_columns_add_up_to_what_they_did(rank: RankExplanation, table: str) -> None:
    before, after = getattr(rank, table), getattr(truncate_tables(rank, 2), table)
    assert len(before) >= 6
    assert len(after) < len(before)
    assert sums(after) == sums(before)


def test_times_of_operators_against_the_roofline_add_up(rank: RankExplanation) -> None:
    before, after = rank.efficiency, truncate_tables(rank, 2).efficiency
    assert before is not None
    assert after is not None
    assert len(before.spots) >= 6
    assert len(after.spots) < len(before.spots)
    assert sum(s.device_ns for s in after.spots) == sum(s.device_ns for s in before.spots)
    assert sum(s.calls for s in after.spots) == sum(s.calls for s in before.spots)


def test_memory_of_modules_and_places_adds_up(rank: RankExplanation) -> None:
    memory = Memory(
        source="snapshot",
        device="cuda",
        peak_bytes=42,
        reserved_bytes=None,
        phase=None,
        measured="",
        categories={},
        by_module=tuple(ModuleBytes(module=f"m{n}", size_bytes=n, tensors=1) for n in range(6)),
        by_site=tuple(SiteBytes(operator=f"o{n}", size_bytes=n, blocks=2) for n in range(6)),
    )
    short = truncate_tables(replace(rank, memory=memory), 2).memory
    assert short is not None
    assert [(row.module, row.size_bytes, row.tensors) for row in short.by_module[2:]] == [
        (OTHERS, 2 + 3 + 4 + 5, 4)
    ]
    assert [(row.operator, row.size_bytes, row.blocks) for row in short.by_site[2:]] == [
        (OTHERS, 2 + 3 + 4 + 5, 8)
    ]


def test_the_longest_stay_and_longest_comes_first(rank: RankExplanation) -> None:
    short = truncate_tables(rank, 2)
    assert set(rank.kernels[:2]) < set(short.kernels)
    totals = [row.total_ns for row in short.kernels]
    assert totals == sorted(totals, reverse=True)
    assert short.operators[:2] == rank.operators[:2]
    assert short.operators[2].name == OTHERS


def test_kinds_of_work_stay_apart(rank: RankExplanation) -> None:
    def by_kind(of: RankExplanation) -> dict[str, int]:
        totals: dict[str, int] = {}
        for row in of.kernels:
            totals[row.kind] = totals.get(row.kind, 0) + row.total_ns
        return totals

    assert by_kind(truncate_tables(rank, 1)) == by_kind(rank)


def test_collectives_left_out_have_no_one_size(rank: RankExplanation) -> None:
    *_, others = truncate_tables(rank, 2).collectives
    assert (others.kind, others.group, others.group_size) == ("all_reduce", "0", 8)
    assert (others.size_bytes, others.busbw_gb_s, others.count) == (None, None, 4)


def test_tables_that_fit_are_left_as_they_are(rank: RankExplanation) -> None:
    assert truncate_tables(rank, 100) == rank
