"""span = compute + exposed_comm + exposed_memory + idle, on traces small enough to draw."""

from __future__ import annotations

from stepscope.records.explanation import Timeline
from stepscope.step.timeline import divide
from stepscope.step.work import Kind, find_work

from .build import (
    AUTOGRAD,
    MAIN,
    WORKER,
    ZERO_NS,
    describing,
    frame,
    kernel,
    memcpy,
    memset,
    note,
    op,
)
from .conftest import Explain, Read


def parts(timeline: Timeline) -> tuple[int, int, int, int, int]:
    return (
        timeline.span_ns,
        timeline.compute_ns,
        timeline.exposed_comm_ns,
        timeline.exposed_memory_ns,
        timeline.idle_ns,
    )


def test_one_kernel_is_all_compute(explained: Explain) -> None:
    timeline = explained(kernel("gemm", start=5, dur=10)).timeline
    assert parts(timeline) == (10_000, 10_000, 0, 0, 0)
    assert timeline.overlap is None


def test_kernels_on_two_streams_count_once_where_they_overlap(explained: Explain) -> None:
    # stream 7   ##########          0-10
    # stream 8        ##########     5-15
    timeline = explained(
        kernel("a", start=0, dur=10, stream=7), kernel("b", start=5, dur=10, stream=8)
    ).timeline
    assert parts(timeline) == (15_000, 15_000, 0, 0, 0)


def test_communication_is_exposed_only_where_no_compute_runs(explained: Explain) -> None:
    # compute  ##########            0-10
    # comm          ##########       5-15: 5 hidden, 5 exposed
    # idle                    ...    15-18
    # compute                    ##  18-20
    timeline = explained(
        kernel("gemm", start=0, dur=10),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start=5, dur=10, stream=20),
        kernel("gemm", start=18, dur=2),
    ).timeline
    assert parts(timeline) == (20_000, 12_000, 5_000, 0, 3_000)
    assert timeline.comm_ns == 10_000
    assert timeline.hidden_comm_ns == 5_000
    assert timeline.overlap == 0.5


def test_a_copy_is_exposed_only_where_neither_compute_nor_communication_runs(
    explained: Explain,
) -> None:
    # compute  ####                  0-4
    # comm         ####              4-8
    # copy       ##########          2-12: 2 under compute, 4 under comm, 4 alone
    timeline = explained(
        kernel("gemm", start=0, dur=4),
        kernel("rcclKernel", start=4, dur=4, stream=20),
        memcpy(start=2, dur=10, stream=21),
    ).timeline
    assert parts(timeline) == (12_000, 4_000, 4_000, 4_000, 0)
    assert timeline.memory_ns == 10_000


def test_a_memset_is_memory_not_compute(explained: Explain) -> None:
    timeline = explained(memset(start=0, dur=3), memset(start=4, dur=3)).timeline
    assert parts(timeline) == (7_000, 0, 0, 6_000, 1_000)


def test_copy_kernels_of_older_rocm_are_memory(explained: Explain) -> None:
    timeline = explained(
        kernel("__amd_rocclr_copyBuffer.kd", start=0, dur=3),
        kernel("__amd_rocclr_fillBufferAligned", start=3, dur=3),
        kernel("my__amd_rocclr_copyBuffer", start=6, dur=1),
    ).timeline
    assert parts(timeline) == (7_000, 1_000, 0, 6_000, 0)


def test_a_memcpy_with_nccl_in_its_name_is_memory(explained: Explain) -> None:
    timeline = explained(memcpy("Memcpy DtoD (nccl buffer)", start=0, dur=3)).timeline
    assert parts(timeline) == (3_000, 0, 0, 3_000, 0)


def test_rows_that_only_describe_the_device_are_not_work(explained: Explain) -> None:
    timeline = explained(
        kernel("gemm", start=10, dur=5),
        describing("cuda_sync", "Stream Sync", start=0, dur=30),
        describing("gpu_user_annotation", "ProfilerStep#1", start=0, dur=30),
    ).timeline
    assert parts(timeline) == (5_000, 5_000, 0, 0, 0)


def test_work_without_a_recorded_launch_counts(explained: Explain) -> None:
    rank = explained(
        kernel("early", start=0, dur=10), kernel("late", start=10, dur=5, launched_at=2)
    )
    assert parts(rank.timeline) == (15_000, 15_000, 0, 0, 0)
    assert rank.launches.unlinked == 1
    assert rank.launches.unlinked_ns == 10_000
    assert [note.count for note in rank.quality if note.id == "unlinked"] == [1]


def test_kernels_below_a_microsecond_keep_their_nanoseconds(explained: Explain) -> None:
    timeline = explained(
        kernel("tiny", start=0.25, dur=0.128), kernel("tiny", start=0.5, dur=0.001)
    ).timeline
    assert parts(timeline) == (251, 129, 0, 0, 122)


def test_a_window_cuts_work_at_its_edges(read: Read) -> None:
    work = find_work(read(kernel("a", start=0, dur=10), kernel("b", start=14, dur=10)))
    timeline = divide(work, (ZERO_NS + 5_000, ZERO_NS + 16_000))
    assert parts(timeline) == (11_000, 7_000, 0, 0, 4_000)


def test_without_a_device_operators_are_the_compute(explained: Explain) -> None:
    # main  [ linear 0-10 [addmm 2-8] ]      [relu 15-18]
    rank = explained(
        op("aten::linear", start=0, dur=10),
        op("aten::addmm", start=2, dur=6),
        op("aten::relu", start=15, dur=3),
        device=None,
    )
    assert rank.kind == "cpu"
    assert parts(rank.timeline) == (18_000, 13_000, 0, 0, 5_000)


def test_without_a_device_what_the_loader_computes_is_data_loading(explained: Explain) -> None:
    # main  [linear 0-4] [ DataLoader 5-15 [stack 7-13] ] [linear 16-20]
    rank = explained(
        op("aten::linear", start=0, dur=4),
        note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start=5, dur=10),
        op("aten::stack", start=7, dur=6),
        op("aten::linear", start=16, dur=4),
        device=None,
    )
    assert parts(rank.timeline) == (20_000, 8_000, 0, 0, 12_000)
    assert rank.idle.data_loading_ns == 10_000


def test_without_a_device_gloo_spans_on_worker_threads_are_communication(
    explained: Explain,
) -> None:
    # main    [addmm 0-10]                  [sgd 20-25]
    # worker       [gloo:all_reduce 6-16]                 4 hidden, 6 exposed
    timeline = explained(
        op("aten::addmm", start=0, dur=10),
        note("gloo:all_reduce", start=6, dur=10, thread=WORKER),
        op("aten::add_", start=20, dur=5),
        device=None,
    ).timeline
    assert parts(timeline) == (25_000, 15_000, 6_000, 0, 4_000)
    assert timeline.overlap == 0.4


def test_operators_inside_a_gloo_span_are_part_of_the_communication(explained: Explain) -> None:
    # main    [addmm 0-10]
    # worker               [gloo:all_gather 12-20 [copy_ 14-18] ]
    timeline = explained(
        op("aten::addmm", start=0, dur=10),
        note("gloo:all_gather", start=12, dur=8, thread=WORKER),
        op("aten::copy_", start=14, dur=4, thread=WORKER),
        device=None,
    ).timeline
    assert parts(timeline) == (20_000, 10_000, 8_000, 0, 2_000)
    assert timeline.hidden_comm_ns == 0


def test_a_thread_that_only_communicates_is_no_part_of_the_device(read: Read) -> None:
    trace = read(
        op("aten::addmm", start=0, dur=10),
        note("gloo:all_gather", start=12, dur=8, thread=WORKER),
        op("aten::copy_", start=14, dur=4, thread=WORKER),
        device=None,
    )
    work = find_work(trace)
    assert [trace.threads[code].tid for code in work.threads.tolist()] == [str(MAIN)]
    assert sorted(work.kind.tolist()) == [Kind.COMPUTE, Kind.COMM]


def test_waiting_inside_a_communication_call_is_not_compute(explained: Explain) -> None:
    # main  [ reducer 0-20 [c10d::allreduce_ 5-15 [copy_ 6-7] ] ]
    timeline = explained(
        op("torch::distributed::reducer", start=0, dur=20),
        op("c10d::allreduce_", start=5, dur=10),
        op("aten::copy_", start=6, dur=1),
        device=None,
    ).timeline
    assert parts(timeline) == (20_000, 10_000, 10_000, 0, 0)


def test_one_thread_waiting_does_not_stop_another_from_computing(explained: Explain) -> None:
    # main      [c10d::barrier 0-10]
    # autograd     [AddmmBackward0 2-8]
    timeline = explained(
        op("c10d::barrier", start=0, dur=10),
        op("aten::add", start=10, dur=1),
        op("AddmmBackward0", start=2, dur=6, thread=AUTOGRAD),
        device=None,
    ).timeline
    assert parts(timeline) == (11_000, 7_000, 4_000, 0, 0)
    assert timeline.hidden_comm_ns == 6_000


def test_python_alone_is_no_work(explained: Explain) -> None:
    rank = explained(frame("train.py(1): main", start=0, dur=10), device=None)
    assert parts(rank.timeline) == (0, 0, 0, 0, 0)
    assert "no-work" in {note.id for note in rank.quality}
