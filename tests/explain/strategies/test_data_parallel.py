"""Buckets: when they are ready, how much of them is exposed, and why."""

from __future__ import annotations

import pytest

from stepscope.explain.strategies.data_parallel import _why
from stepscope.records.job import Clock
from stepscope.records.strategies import DataParallel, RankDataParallel

from ..build import AUTOGRAD, Events, note
from ..conftest import Read
from .found import ENGINE, US, comm, compute, join, strategies_of


def reduce(start: float, end: float, *, at: float, elements: int = 1000) -> Events:
    return comm(
        "allreduce",
        start,
        end,
        launched_at=at,
        thread=AUTOGRAD,
        around=(ENGINE, "c10d::allreduce_"),
        elements=elements,
    )


def ddp(late: float = 0) -> list[Events]:
    """Backward from 100 to 400; three buckets, each after a third of it.

    The first fits behind compute, the second has 90 left for its 110, the third comes last.
    """
    return [
        note("DistributedDataParallel.forward", start=-50, dur=40),
        compute(0, 100, launched_at=-40),
        compute(100, 200, launched_at=10, backward=True),
        reduce(205 + late, 255 + late, at=20, elements=1000),
        compute(200, 300, launched_at=30, backward=True),
        reduce(310, 420, at=40, elements=2000),
        compute(300, 400, launched_at=50, backward=True),
        reduce(420, 480, at=60, elements=500),
    ]


def only(found: tuple[object, ...]) -> RankDataParallel:
    (each,) = found
    assert isinstance(each, RankDataParallel)
    return each


def test_buckets_of_a_bare_trace_with_their_times_and_causes(read: Read) -> None:
    each = only(strategies_of(read(*ddp())))
    assert each.evidence == ("DistributedDataParallel.forward is annotated",)
    assert [bucket.size_bytes for bucket in each.buckets] == [4000, 8000, 2000]
    assert [bucket.ready_ns for bucket in each.buckets] == [100 * US, 200 * US, 300 * US]
    assert [bucket.start_ns for bucket in each.buckets] == [105 * US, 210 * US, 320 * US]
    assert [bucket.end_ns for bucket in each.buckets] == [155 * US, 320 * US, 380 * US]
    assert [bucket.exposed_ns for bucket in each.buckets] == [0, 20 * US, 60 * US]
    assert [bucket.why for bucket in each.buckets] == ["hidden", "long", "last"]
    assert each.backward_ns == 300 * US
    assert each.exposed_ns == 80 * US
    assert each.comm_ns == 220 * US


def test_without_an_annotation_backward_gives_it_away(read: Read) -> None:
    each = only(strategies_of(read(*ddp()[1:])))
    assert each.evidence == ("all-reduces called by backward",)
    assert len(each.buckets) == 3


def test_the_capture_names_parameters_and_keeps_strangers_out(read: Read) -> None:
    replica = {
        "module": "Net",
        "group": "0",
        "world_size": 4,
        "buckets": [
            {"size_bytes": 4000, "parameters": ["b"]},
            {"size_bytes": 8000, "parameters": ["a", "c"]},
            {"size_bytes": 2000, "parameters": None},
        ],
    }
    stranger = comm("allreduce", 490, 500, launched_at=70, elements=7)
    trace = read(*ddp(), stranger)
    each, other = strategies_of(trace, {"ddp": [replica]})
    assert isinstance(each, RankDataParallel)
    assert each.evidence == ("DistributedDataParallel of Net over 4 ranks",)
    assert [bucket.parameters for bucket in each.buckets] == [("b",), ("a", "c"), ()]
    assert type(other).__name__ == "RankOtherCommunication"


def test_buffers_that_ddp_broadcasts_are_its_own(read: Read) -> None:
    sent = comm("broadcast", -30, -25, launched_at=-45, around=("c10d::broadcast_",))
    each = only(strategies_of(read(*ddp(), sent)))
    assert len(each.buckets) == 3
    assert each.comm_ns == 225 * US


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ({"exposed_ns": 10}, "hidden"),
        ({"exposed_ns": 60, "queued_ns": 40, "after_ns": 2, "left_ns": 40}, "queued"),
        ({"exposed_ns": 60, "queued_ns": 40, "after_ns": 30, "left_ns": 40}, "long"),
        ({"exposed_ns": 100, "queued_ns": 4, "after_ns": 2}, "last"),
        ({"exposed_ns": 60, "left_ns": 300}, "gaps"),
    ],
)
def test_why(numbers: dict[str, int], why: str) -> None:
    given = {"time_ns": 100, "queued_ns": 0, "after_ns": None, "left_ns": 0, **numbers}
    assert _why(**given) == why  # type: ignore[arg-type]


def test_a_wait_for_another_rank_is_told_where_clocks_agree(read: Read) -> None:
    """Rank 1 computes 30 longer before its last bucket: rank 0 has come and waits."""
    mine = only(strategies_of(read(*ddp())))
    slow = ddp()
    slow[6] = compute(300, 430, launched_at=50, backward=True)
    slow[7] = reduce(430, 480, at=60, elements=500)
    theirs = only(strategies_of(read(*slow)))
    parts = [
        (strategy_with_group_of(mine, 2),),
        (strategy_with_group_of(theirs, 2),),
    ]
    clock = Clock(aligned=True, reference=0, offset_ns={0: 0, 1: 0}, error_ns={0: 0, 1: 1000})
    (joined,) = join(parts, clock)
    assert isinstance(joined, DataParallel)
    last = joined.buckets[-1]
    assert last.late_rank == 1
    assert last.wait_ns == 15 * US  # 30 on rank 0, none on rank 1
    assert last.why == "late rank"
    assert joined.size == 2
    (blind,) = join(parts)
    assert isinstance(blind, DataParallel)
    assert blind.buckets[-1].wait_ns is None
    assert blind.buckets[-1].why == "last"


def strategy_with_group_of(each: RankDataParallel, size: int) -> RankDataParallel:
    from msgspec.structs import replace

    group = replace(each.groups[0], size=size, ranks=tuple(range(size)))
    return replace(each, groups=(group,))
