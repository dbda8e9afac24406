"""Every call belongs to one strategy; what nothing explains is listed."""

from __future__ import annotations

import msgspec

from stepscope.records.strategies import OtherCommunication, RankOtherCommunication

from ..build import AUTOGRAD, kernel, nccl
from ..conftest import Read
from .found import ENGINE, US, comm, compute, join, strategies_of
from .test_fully_sharded import gather, scatter, two_blocks, used
from .test_tensor_parallel import FUNCTIONAL


def test_sharded_and_split_at_once(read: Read) -> None:
    meet = comm(
        "allreduce",
        300,
        305,
        launched_at=55,
        around=FUNCTIONAL,
        group="3",
        size=2,
        description="mesh_tp",
    )
    sharded, tensor = strategies_of(read(*two_blocks(), meet))
    assert [group.name for group in sharded.groups] == ["0"]  # type: ignore[union-attr]
    assert [group.name for group in tensor.groups] == ["3"]  # type: ignore[union-attr]


def test_data_parallel_over_split_layers(read: Read) -> None:
    split = {"around": FUNCTIONAL, "group": "3", "description": "mesh_tp"}
    found = strategies_of(
        read(
            compute(0, 100, launched_at=-50),
            comm("allreduce", 100, 120, launched_at=-40, **split),
            compute(120, 220, launched_at=-30, backward=True),
            comm(
                "allreduce",
                220,
                260,
                launched_at=-20,
                thread=AUTOGRAD,
                around=(ENGINE, "c10d::allreduce_"),
                group="1",
            ),
        )
    )
    assert [type(each).__name__ for each in found] == ["RankTensorParallel", "RankDataParallel"]


def test_what_nothing_explains_is_listed_with_its_caller(read: Read) -> None:
    stranger = comm(
        "allreduce", 500, 520, launched_at=150, around=("SyncBatchNorm", "c10d::allreduce_")
    )
    *_, other = strategies_of(read(*two_blocks(), stranger))
    assert isinstance(other, RankOtherCommunication)
    (use,) = other.uses
    assert (use.operation, use.caller, use.count) == ("all_reduce", "SyncBatchNorm", 1)
    assert other.exposed_ns == 20 * US
    (joined,) = join([(other,), (other,)])
    assert isinstance(joined, OtherCommunication)
    assert joined.uses[0].time_ns == 20 * US


def test_a_rank_alone_has_no_strategy(read: Read) -> None:
    assert strategies_of(read(compute(0, 10, launched_at=-5))) == ()


def test_kernels_whose_launch_was_not_recorded_are_listed(read: Read) -> None:
    args = nccl("allreduce", in_elements=10, out_elements=10)
    bare = kernel("ncclDevKernel_AllReduce", start=0, dur=10, **args)
    (other,) = strategies_of(read(bare, kernel("gemm", start=20, dur=10)))
    assert isinstance(other, RankOtherCommunication)
    assert other.exposed_ns == 10 * US


def test_records_become_json_as_they_are(read: Read) -> None:
    found = strategies_of(read(*two_blocks()))
    (text,) = msgspec.to_builtins(join([found]))
    assert text["kind"] == "fully_sharded"
    assert text["blocks"][0]["exposed_ns"] == 50 * US


def test_every_call_is_somewhere(read: Read) -> None:
    events = [gather("a", 0, 10, at=-20), used("a", -10), scatter("a", 30, 40, at=0)]
    events += [comm("broadcast", 50 + i, 51 + i, launched_at=20 + 5 * i) for i in range(3)]
    found = strategies_of(read(*events, compute(10, 30, launched_at=-5)))
    total = sum(each.comm_ns for each in found)  # type: ignore[union-attr]
    assert total == (10 + 10 + 3) * US
