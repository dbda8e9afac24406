"""Collectives by kind, group and size, with their bandwidths."""

from __future__ import annotations

import pytest

from stepscope.records.trace import CollectiveArgs
from stepscope.step.collectives import bus_factor, kind_of, size_bytes

from .build import WORKER, kernel, nccl, note, op, step
from .conftest import Explain


def test_bandwidths_of_an_all_reduce(explained: Explain) -> None:
    # 2 calls of 1 M floats (4 MB) in 80 + 120 µs: 8 MB / 200 µs = 40 GB/s; 8 ranks: x 14/8
    arguments = nccl("allreduce", in_elements=1_000_000, out_elements=1_000_000)
    (row,) = explained(
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start=0, dur=80, **arguments),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start=100, dur=120, **arguments),
        kernel("gemm", start=50, dur=60, stream=9),
    ).collectives
    assert (row.kind, row.group, row.group_size, row.size_bytes) == (
        "all_reduce",
        "0",
        8,
        4_000_000,
    )
    assert (row.count, row.total_ns) == (2, 200_000)
    assert row.exposed_ns == 50_000 + 110_000  # the gemm hides 50-80 and 100-110
    assert row.algbw_gb_s == pytest.approx(40.0)
    assert row.busbw_gb_s == pytest.approx(70.0)


def test_other_sizes_groups_and_kinds_are_other_rows(explained: Explain) -> None:
    def sent(at: float, kind: str, elements: int, group: str) -> list[dict[str, object]]:
        arguments = nccl(kind, in_elements=elements, out_elements=elements, group=group)
        return kernel("ncclDevKernel", start=at, dur=10, **arguments)

    rows = explained(
        sent(0, "allreduce", 10, "0"),
        sent(10, "allreduce", 20, "0"),
        sent(20, "allreduce", 10, "1"),
        sent(30, "broadcast", 10, "0"),
        sent(40, "allreduce", 10, "0"),
    ).collectives
    assert {(row.kind, row.group, row.size_bytes): row.count for row in rows} == {
        ("all_reduce", "0", 40): 2,
        ("all_reduce", "0", 80): 1,
        ("all_reduce", "1", 40): 1,
        ("broadcast", "0", 40): 1,
    }
    assert rows[0].count == 2  # the longest total first


def test_kernels_without_arguments_are_known_by_name_alone(explained: Explain) -> None:
    (row,) = explained(
        kernel("ncclKernel_AllGather_RING_LL_Sum_int8_t", start=0, dur=10),
        kernel("ncclDevKernel_AllGather_RING_LL", start=20, dur=5),
    ).collectives
    assert (row.kind, row.count, row.total_ns) == ("all_gather", 2, 15_000)
    assert row.size_bytes is None
    assert row.algbw_gb_s is None
    assert row.busbw_gb_s is None


def test_gloo_spans_carry_what_one_rank_gives(explained: Explain) -> None:
    # 1000 floats a rank: an all-reduce of 4 kB, an all-gather of 4 ranks x 4 kB
    rows = explained(
        op("c10d::allreduce_", start=0, dur=3),
        note("gloo:all_reduce", start=1, dur=10, thread=WORKER, shapes=[[1000]], dtypes=["float"]),
        op("c10d::allgather_", start=20, dur=3),
        note("gloo:all_gather", start=21, dur=16, thread=WORKER, shapes=[[1000]], dtypes=["float"]),
        device=None,
        rank=0,
        world_size=4,
    ).collectives
    assert [(row.kind, row.count, row.group_size, row.size_bytes) for row in rows] == [
        ("all_gather", 1, 4, 16_000),
        ("all_reduce", 1, 4, 4_000),
    ]
    assert rows[0].algbw_gb_s == pytest.approx(1.0)
    assert rows[0].busbw_gb_s == pytest.approx(0.75)


@pytest.mark.parametrize(("groups", "size"), [(None, 8), ([8], 8), ([4, 4], 4), ([8, 4, 2], None)])
def test_gloo_spans_name_no_group_so_its_size_is_known_only_where_all_agree(
    explained: Explain, groups: list[int] | None, size: int | None
) -> None:
    (row,) = explained(
        note("gloo:all_reduce", start=0, dur=10, shapes=[[1000]], dtypes=["float"]),
        device=None,
        rank=0,
        world_size=8,
        groups=groups,
    ).collectives
    assert row.group_size == size
    assert (row.busbw_gb_s is None) == (size is None)


def test_metadata_of_the_call_describes_a_kernel_that_has_none(explained: Explain) -> None:
    """Older files: only record_param_comms around the launch tells what the kernel does."""
    (comms,) = op("record_param_comms", start=0, dur=10)
    comms["args"] |= nccl("allreduce", in_elements=10, out_elements=10, group="3")
    (row,) = explained(
        [comms], kernel("ncclKernel_AllReduce", start=20, dur=5, launched_at=5)
    ).collectives
    assert (row.kind, row.group, row.group_size, row.size_bytes) == ("all_reduce", "3", 8, 40)


def test_a_gloo_all_gather_without_a_world_size_has_no_known_bytes(explained: Explain) -> None:
    (row,) = explained(
        note("gloo:all_gather", start=0, dur=16, shapes=[[1000]], dtypes=["float"]), device=None
    ).collectives
    assert row.size_bytes is None


@pytest.mark.parametrize(
    ("kind", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_reduce", 1, 0.0),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 8, 0.875),
        ("broadcast", 8, 1.0),
        ("reduce", 8, 1.0),
        ("send_recv", 2, 1.0),
    ],
)
def test_bus_factors_are_those_of_the_definitions(kind: str, ranks: int, factor: float) -> None:
    assert bus_factor(kind, ranks) == factor


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "all_reduce"),
        ("ncclKernel_AllReduce_TREE_LL_Sum_float", "all_reduce"),
        ("void vllm::cross_device_reduce_1stage<float, 2>", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL", "all_gather"),
        ("_allgather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("ncclDevKernel_SendRecv", "send_recv"),
        ("gloo:barrier", "barrier"),
        ("gloo:gather", "gather"),
        ("gloo:scatter", "scatter"),
        ("gloo:reduce", "reduce"),
        ("gloo:send", "send"),
        ("gloo:recv", "recv"),
        ("ncclDevKernel_Generic", "other"),
    ],
)
def test_kinds_by_any_librarys_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("args", "size"),
    [
        (CollectiveArgs(name="allreduce", in_elements=10, out_elements=10, dtype="Float"), 40),
        (
            CollectiveArgs(name="_allgather_base", in_elements=10, out_elements=80, dtype="Half"),
            160,
        ),
        (
            CollectiveArgs(
                name="_reduce_scatter_base", in_elements=80, out_elements=10, dtype="BFloat16"
            ),
            160,
        ),
        (CollectiveArgs(name="allreduce", in_elements=10, out_elements=10, dtype="Mystery"), None),
        (CollectiveArgs(name="allreduce", dtype="Float"), None),
    ],
)
def test_bytes_are_the_total(args: CollectiveArgs, size: int | None) -> None:
    assert size_bytes(args) == size


def test_time_in_which_two_calls_run_counts_once_for_the_first(explained: Explain) -> None:
    # 0-60 an all-reduce, 40-100 a broadcast beside it; 105-140 an all-reduce, 110-130 a broadcast;
    # a gemm hides 50-70. Exposed: 0-50 and 105-140 of all-reduces; 70-100 of broadcasts, as 40-50
    # is the first's and 110-130 too.
    reduce = nccl("allreduce", in_elements=10, out_elements=10)
    broadcast = nccl("broadcast", in_elements=10, out_elements=10)
    rank = explained(
        kernel("ncclDevKernel_AllReduce", start=0, dur=60, stream=20, **reduce),
        kernel("ncclDevKernel_Broadcast", start=40, dur=60, stream=21, **broadcast),
        kernel("ncclDevKernel_AllReduce", start=105, dur=35, stream=20, **reduce),
        kernel("ncclDevKernel_Broadcast", start=110, dur=20, stream=21, **broadcast),
        kernel("gemm", start=50, dur=20),
    )
    exposed = {row.kind: row.exposed_ns for row in rank.collectives}
    assert exposed == {"all_reduce": 85_000, "broadcast": 30_000}
    assert sum(exposed.values()) == rank.timeline.exposed_comm_ns


def test_a_call_whose_launch_is_not_recorded_belongs_to_the_cycle_it_runs_in(
    explained: Explain,
) -> None:
    # The device is 100 µs behind its host: what runs at 20 was launched before the recording, but
    # the host was in step 1 then. Cycles: 100-200 and 200-300.
    reduce = nccl("allreduce", in_elements=10, out_elements=10)
    rank = explained(
        step(1, start=0, dur=100),
        step(2, start=100, dur=100),
        step(3, start=200, dur=10),
        kernel("ncclDevKernel_AllReduce", start=20, dur=30, stream=20, **reduce),
        kernel("a", start=100, dur=40, launched_at=1),
        kernel("ncclDevKernel_AllReduce", start=150, dur=30, stream=20, **reduce),
        kernel("a", start=200, dur=40, launched_at=101),
        kernel("a", start=300, dur=40, launched_at=201),
    )
    assert rank.steps.cycles_ns == (100_000, 100_000)
    assert rank.part.calls.step.tolist() == [-1, 0]
