"""Why the device waited: host, launch or other; and what the host was doing meanwhile."""

from __future__ import annotations

import pytest

from stepscope import read_trace
from stepscope.records.explanation import GAP_CAUSES, Idle, RankExplanation
from stepscope.step.timeline import BLOCKING_CALL

from .build import (
    AUTOGRAD,
    MAIN,
    WORKER,
    ZERO_NS,
    Events,
    call,
    frame,
    graph,
    kernel,
    note,
    op,
    overhead,
    step,
)
from .conftest import Explain


def split(idle: Idle) -> tuple[int, int, int]:
    return idle.host_ns, idle.launch_ns, idle.other_ns


def causes(idle: Idle) -> dict[str, int]:
    return {
        name: ns
        for name in ("data_loading", "sync", "operators", "python", "profiler")
        if (ns := getattr(idle, f"{name}_ns"))
    }


def gaps(rank: RankExplanation) -> list[tuple[int, int, str]]:
    """(start, end, cause) in µs of the test's clock."""
    return [
        ((start - ZERO_NS) // 1000, (end - ZERO_NS) // 1000, GAP_CAUSES[cause])
        for start, end, cause in zip(
            rank.gaps.start_ns.tolist(),
            rank.gaps.end_ns.tolist(),
            rank.gaps.cause.tolist(),
            strict=True,
        )
    ]


def host_gap(*host: Events) -> tuple[Events, ...]:
    """A gap from 10 to 110 µs, ended by a kernel whose launch call began at 105."""
    return (
        kernel("a", start=0, dur=10, launched_at=-5),
        kernel("b", start=110, dur=10, launched_at=105),
        *host,
    )


def test_gap_is_the_hosts_when_the_launch_began_after_the_device_ran_dry(
    explained: Explain,
) -> None:
    rank = explained(*host_gap())
    assert split(rank.idle) == (100_000, 0, 0)
    assert gaps(rank) == [(10, 110, "python")]


def test_gap_is_latency_when_the_work_was_queued_and_the_gap_is_short(explained: Explain) -> None:
    rank = explained(
        kernel("a", start=0, dur=10, launched_at=-5),
        kernel("b", start=12, dur=10, launched_at=-3),
    )
    assert split(rank.idle) == (0, 2_000, 0)
    assert gaps(rank) == [(10, 12, "launch")]


@pytest.mark.parametrize(
    ("began", "expected"),
    [(29.999, (0, 29_999, 0)), (30, (0, 0, 30_000)), (70, (0, 0, 70_000))],
)
def test_a_queued_gap_is_latency_only_below_thirty_microseconds(
    explained: Explain, began: float, expected: tuple[int, int, int]
) -> None:
    rank = explained(
        kernel("a", start=0, dur=10, launched_at=-5),
        kernel("b", start=10 + began, dur=10, launched_at=-3),
    )
    assert split(rank.idle) == expected


@pytest.mark.parametrize(("launched_at", "host"), [(9.999, 0), (10, 0), (10.001, 5_000)])
def test_a_launch_at_the_very_end_of_the_previous_work_was_in_time(
    explained: Explain, launched_at: float, host: int
) -> None:
    rank = explained(
        kernel("a", start=0, dur=10), kernel("b", start=15, dur=1, launched_at=launched_at)
    )
    assert rank.idle.host_ns == host


def test_work_without_a_launch_was_queued_before_the_window(explained: Explain) -> None:
    # 10-12 short: latency; 22-100 long: other. Never the host's fault, whatever it does meanwhile.
    rank = explained(
        op("aten::mm", start=11, dur=80),
        kernel("a", start=0, dur=10),
        kernel("b", start=12, dur=10),
        kernel("c", start=100, dur=10),
    )
    assert split(rank.idle) == (0, 2_000, 78_000)


def test_work_of_no_length_still_ends_a_gap(explained: Explain) -> None:
    # z at 50 was launched too late, b behind it was queued long before
    rank = explained(
        kernel("a", start=0, dur=10, launched_at=-5),
        kernel("z", start=50, dur=0, launched_at=40),
        kernel("b", start=60, dur=10, launched_at=-4),
    )
    assert gaps(rank) == [(10, 50, "python"), (50, 60, "launch")]


def test_other_streams_fill_a_streams_gap(explained: Explain) -> None:
    # stream 7  ##        ##     0-2, 10-12
    # stream 8   #######         1-8: only 8-10 is idle, ended by b
    rank = explained(
        kernel("a", start=0, dur=2, launched_at=-9),
        kernel("c", start=1, dur=7, stream=8, launched_at=-8),
        kernel("b", start=10, dur=2, launched_at=9, launch_dur=0.5),
    )
    assert gaps(rank) == [(8, 10, "python")]
    assert split(rank.idle) == (2_000, 0, 0)


def test_a_long_kernel_hides_the_gaps_under_it(explained: Explain) -> None:
    # stream 7  ####################   0-20
    # stream 8   ##   ##               1-3, 6-8: inside
    # stream 8                     ##  22-24
    rank = explained(
        kernel("long", start=0, dur=20, launched_at=-9),
        kernel("s", start=1, dur=2, stream=8, launched_at=-8),
        kernel("s", start=6, dur=2, stream=8, launched_at=-7),
        kernel("s", start=22, dur=2, stream=8, launched_at=-6),
    )
    assert gaps(rank) == [(20, 22, "launch")]


def test_within_a_graph_only_the_first_kernel_can_wait_for_the_host(explained: Explain) -> None:
    # graph launched at 50, after a ended at 10: 10-60 is the host's; 65-67 and 72-120 are not
    rank = explained(
        kernel("a", start=0, dur=10, launched_at=-5),
        graph(
            [
                kernel("n1", start=60, dur=5),
                kernel("n2", start=67, dur=5),
                kernel("n3", start=120, dur=5),
            ],
            launched_at=50,
        ),
    )
    assert gaps(rank) == [(10, 60, "python"), (65, 67, "launch"), (72, 120, "other")]
    assert split(rank.idle) == (50_000, 2_000, 48_000)
    assert rank.launches.graph_kernels == 3
    assert rank.launches.unlinked == 0


def test_idle_time_while_loading_data(explained: Explain) -> None:
    # gap 10-110; loader 20-90 (with operators in it), then Python until the launch
    rank = explained(
        *host_gap(
            note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", start=20, dur=70),
            op("aten::stack", start=30, dur=20),
        )
    )
    # 10-20 and 90-105 Python, 105-106 the launch call, 106-110 nothing of the host's: Python
    assert causes(rank.idle) == {"data_loading": 70_000, "operators": 1_000, "python": 29_000}
    assert gaps(rank) == [(10, 110, "data_loading")]


def test_idle_time_inside_a_blocking_call(explained: Explain) -> None:
    # The call began before the device ran dry; only 10-60 of it is idle time.
    rank = explained(*host_gap(call("cudaStreamSynchronize", start=-4, dur=64)))
    assert causes(rank.idle) == {"sync": 50_000, "operators": 1_000, "python": 49_000}
    assert gaps(rank) == [(10, 110, "sync")]
    assert rank.idle.after_sync_ns == 100_000
    assert rank.idle.after_sync_gaps == 1


def test_a_sync_that_ended_before_the_gap_did_not_open_it(explained: Explain) -> None:
    rank = explained(*host_gap(call("cudaStreamSynchronize", start=-4, dur=10)))
    assert rank.idle.after_sync_ns == 0


def test_idle_time_inside_operators_and_runtime_calls(explained: Explain) -> None:
    rank = explained(
        *host_gap(op("aten::linear", start=20, dur=60), call("cudaMalloc", start=85, dur=5))
    )
    # 20-80 operator, 85-90 cudaMalloc, 105-106 the launch
    assert causes(rank.idle) == {"operators": 66_000, "python": 34_000}
    assert gaps(rank) == [(10, 110, "operators")]


def test_idle_time_while_the_profiler_handles_its_buffers(explained: Explain) -> None:
    rank = explained(
        *host_gap(op("aten::linear", start=10, dur=100), overhead("Buffer Flush", start=30, dur=60))
    )
    assert causes(rank.idle) == {"profiler": 60_000, "operators": 40_000}


@pytest.mark.parametrize(
    "name",
    [
        "Command Buffer Full",
        "Lazy Function Loading",
        "Runtime Triggered Module Loading",
        "Driver Compiler",
    ],
)
def test_the_drivers_own_work_is_not_the_profilers(explained: Explain, name: str) -> None:
    rank = explained(
        *host_gap(op("aten::linear", start=10, dur=100), overhead(name, start=30, dur=60))
    )
    assert causes(rank.idle) == {"operators": 100_000}


def test_threads_that_feed_nothing_explain_nothing(explained: Explain) -> None:
    rank = explained(*host_gap(op("aten::stack", start=10, dur=95, thread=WORKER)))
    assert causes(rank.idle) == {"operators": 1_000, "python": 99_000}


def test_all_threads_that_launch_feed_the_device(explained: Explain) -> None:
    rank = explained(
        *host_gap(
            op("AddmmBackward0", start=10, dur=40, thread=AUTOGRAD),
            kernel("bwd", start=200, dur=1, launched_at=40, thread=AUTOGRAD),
        )
    )
    # 120-200 was queued at 40: other
    assert causes(rank.idle) == {"operators": 41_000, "python": 59_000}
    assert split(rank.idle) == (100_000, 0, 80_000)


def test_causes_add_up_where_everything_overlaps(explained: Explain) -> None:
    # profiler > data loading > blocking call > operators > Python, nanosecond by nanosecond
    rank = explained(
        *host_gap(
            op("aten::linear", start=5, dur=60),
            call("cudaStreamSynchronize", start=15, dur=40),
            note("data_loading", start=30, dur=50),
            overhead("Instrumentation", start=35, dur=5),
        )
    )
    # 10-15 operators, 15-30 sync, 30-35 data, 35-40 profiler, 40-80 data, 80-105 Python,
    # 105-106 launch call, 106-110 Python
    assert causes(rank.idle) == {
        "operators": 6_000,
        "sync": 15_000,
        "data_loading": 45_000,
        "profiler": 5_000,
        "python": 29_000,
    }
    assert sum(causes(rank.idle).values()) == rank.idle.host_ns


def test_a_gap_knows_the_python_function_it_fell_into(explained: Explain) -> None:
    rank = explained(
        *host_gap(
            frame("train.py(1): main", start=-10, dur=200),
            frame("data.py(7): collate", start=40, dur=50),
            op("aten::stack", start=50, dur=20),
        )
    )
    # the middle of 10-110 is 60: inside collate
    (at,) = rank.gaps.frame.tolist()
    lines = {(line.file, line.line) for line in rank.lines}
    assert lines == {("train.py", 1), ("data.py", 7)}
    trace = read_trace(rank.path, cache=False)
    assert trace.strings[trace.host.name[at]] == "data.py(7): collate"


def test_without_stacks_no_gap_knows_its_function(explained: Explain) -> None:
    assert explained(*host_gap()).gaps.frame.tolist() == [-1]


def test_without_a_device_all_idle_time_is_the_hosts(explained: Explain) -> None:
    rank = explained(
        step(1, start=0, dur=50),
        op("aten::a", start=0, dur=10),
        note("enumerate(DataLoader)#x.__next__", start=12, dur=10, thread=MAIN),
        op("aten::b", start=30, dur=20),
        device=None,
    )
    assert split(rank.idle) == (20_000, 0, 0)
    assert causes(rank.idle) == {"data_loading": 10_000, "python": 10_000}


def test_without_a_device_operators_of_no_length_bound_the_span(explained: Explain) -> None:
    rank = explained(
        op("aten::first", start=0, dur=0),
        op("aten::b", start=10, dur=20),
        op("aten::last", start=35, dur=0),
        device=None,
    )
    assert (rank.timeline.span_ns, rank.timeline.idle_ns) == (35_000, 15_000)
    assert gaps(rank) == [(0, 10, "python"), (30, 35, "python")]


@pytest.mark.parametrize(
    "name",
    [
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cuCtxSynchronize",
        "hipStreamSynchronize",
        "hipMemcpyWithStream",
        "cudaMemcpy",
        "cudaMemcpy2D",
        "cuMemcpyDtoH_v2",
        "zeCommandQueueSynchronize",
        "urQueueFinish",
    ],
)
def test_calls_that_block(name: str) -> None:
    assert BLOCKING_CALL.search(name)


@pytest.mark.parametrize(
    "name",
    [
        "cudaMemcpyAsync",
        "cudaMemcpy2DAsync",
        "cuMemcpyDtoHAsync_v2",
        "hipMemcpyAsync",
        "cudaLaunchKernel",
        "cudaEventRecord",
        "cudaStreamWaitEvent",
        "cudaEventQuery",
    ],
)
def test_calls_that_do_not_block(name: str) -> None:
    assert not BLOCKING_CALL.search(name)
