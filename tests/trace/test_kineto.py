"""What each kind of event and key means, for every writer of such files that we know."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from kineto_events import call, flow, kernel, memory, op, ops, span, thread_name

from stepscope import read_trace
from stepscope.records.trace import DeviceKind, HostKind, Trace
from stepscope.trace import files
from stepscope.trace.formats import columns
from stepscope.trace.formats.columns import EventTable, is_constant


@pytest.fixture
def read(write_trace: Any) -> Any:
    def write_and_read(events: list[Any], layout: str = "kineto", **options: Any) -> Trace:
        return read_trace(write_trace(events, layout, **options), cache=False)

    return write_and_read


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("cpu_op", HostKind.OPERATOR),
        ("Operator", HostKind.OPERATOR),
        ("user_annotation", HostKind.ANNOTATION),
        ("python_function", HostKind.PYTHON),
        ("cuda_runtime", HostKind.RUNTIME),
        ("cuda_driver", HostKind.RUNTIME),
        ("Runtime", HostKind.RUNTIME),
        ("hip_runtime", HostKind.RUNTIME),
        ("xpu_runtime", HostKind.RUNTIME),
        ("mtia_runtime", HostKind.RUNTIME),
        ("overhead", HostKind.OVERHEAD),
        ("fwd_pass", HostKind.OTHER),
    ],
)
def test_host_categories_old_and_new(read: Any, category: str, kind: HostKind) -> None:
    trace = read([*ops(1), span(category, "it", 100, 5)])
    # The host row of that name.
    assert trace.host.kind[[trace.strings[code] for code in trace.host.name].index("it")] == kind
    assert len(trace.device) == 0


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("kernel", DeviceKind.KERNEL),
        ("Kernel", DeviceKind.KERNEL),
        ("concurrent_kernel", DeviceKind.KERNEL),
        ("xpu_kernel", DeviceKind.KERNEL),
        ("mtia_ccp_events", DeviceKind.KERNEL),
        ("gpu_memcpy", DeviceKind.MEMCPY),
        ("Memcpy", DeviceKind.MEMCPY),
        ("gpu_memset", DeviceKind.MEMSET),
        ("Memset", DeviceKind.MEMSET),
        ("cuda_sync", DeviceKind.SYNC),
        ("gpu_user_annotation", DeviceKind.ANNOTATION),
        ("cuda_event", DeviceKind.OTHER),
    ],
)
def test_device_categories_old_and_new(read: Any, category: str, kind: DeviceKind) -> None:
    trace = read([*ops(1), span(category, "it", 100, 5, pid=0, tid=7)])
    assert trace.device.kind.tolist() == [kind]
    assert len(trace.host) == 1


@pytest.mark.parametrize(
    ("events", "head", "kind"),
    [
        (ops(1), {}, "cpu"),
        ([kernel("k", 1, 1)], {}, "cuda"),
        ([span("Kernel", "k", 1, 1), span("Memcpy", "m", 3, 1)], {}, "cuda"),
        ([span("xpu_kernel", "k", 1, 1)], {}, "xpu"),
        ([span("mtia_ccp_events", "k", 1, 1)], {}, "mtia"),
        ([span("hip_runtime", "hipLaunchKernel", 1, 1)], {}, "rocm"),
        ([call("hipLaunchKernel", 1, 1, 5), kernel("k", 2, 1, 5)], {}, "rocm"),
        ([kernel("k", 2, 1, 5)], {"roctracer_version": 1}, "rocm"),
        ([kernel("k", 1, 1)], {"deviceProperties": [{"id": 0, "name": "AMD MI300X"}]}, "rocm"),
        ([op("hipster", 1, 1), kernel("k", 1, 1)], {}, "cuda"),
    ],
)
def test_the_platform_follows_from_the_recorded_events(
    read: Any, events: list[Any], head: dict[str, Any], kind: str
) -> None:
    assert read(events, head=head).kind == kind


@pytest.mark.parametrize("layout", ["events_first", "events_last"])
def test_rank_and_world_are_read_before_and_after_the_events(read: Any, layout: str) -> None:
    group = {"pg_name": "0", "ranks": [0, 1]}
    info = {"rank": "5", "world_size": 8, "backend": "nccl", "pg_config": [group, "odd"]}
    trace = read(ops(2), layout, head={"distributedInfo": info}, tail={})
    assert (trace.rank, trace.world_size, trace.backend) == (5, 8, "nccl")
    assert trace.groups == (group,)


@pytest.mark.parametrize("info", [None, [], "x", {}, {"rank": None, "world_size": [8]}])
def test_a_missing_or_odd_rank_is_unknown_not_zero(read: Any, info: Any) -> None:
    trace = read(ops(1), head={"distributedInfo": info})
    assert trace.rank is None
    assert trace.world_size is None
    assert trace.groups == ()


@pytest.mark.parametrize("rank", [-1, True, 1.5, "two", "²", "9" * 5000, 10**40, {"a": 1}])
def test_a_rank_that_is_not_a_count_is_unknown(read: Any, rank: Any) -> None:
    assert read(ops(1), head={"distributedInfo": {"rank": rank}}).rank is None


def test_devices_with_odd_or_missing_fields_are_kept(read: Any) -> None:
    rows = [{"id": 0, "name": ""}, {"id": "1", "name": None, "numSms": "x"}, 5]
    trace = read([kernel("k", 1, 1)], head={"deviceProperties": rows})
    assert [device.id for device in trace.devices] == [0, 1]
    assert trace.device_name is None


def test_times_are_absolute_and_exact_on_the_base(read: Any) -> None:
    base = 1_790_857_026_000_000_000
    trace = read([op("a", 3_845_302_658_405.829, 584.887)], head={"baseTimeNanoseconds": base})
    assert trace.host.start_ns.tolist() == [base + 3_845_302_658_405_829]
    assert trace.host.dur_ns.tolist() == [584_887]


def test_old_files_with_whole_epoch_microseconds_need_no_base(read: Any) -> None:
    trace = read([op("a", 1_650_000_000_123_456, 7), op("b", 1_650_000_000_123_460, 0)])
    assert trace.host.start_ns.tolist() == [1_650_000_000_123_456_000, 1_650_000_000_123_460_000]


def test_a_base_outside_the_range_of_times_is_ignored_and_reported(read: Any) -> None:
    trace = read([op("a", 1_650_000_000_123_456, 7)], head={"baseTimeNanoseconds": 2**61 + 2**60})
    assert trace.host.start_ns.tolist() == [1_650_000_000_123_456_000]
    assert [note.id for note in trace.quality] == ["base-ignored"]


def test_rocm_numbers_in_quotes_are_numbers(read: Any) -> None:
    events = [
        call("hipLaunchKernel", 0, 5, "77"),
        kernel("k", 9, 5, "77", stream="0", device="2", bytes="12"),
    ]
    trace = read(events)
    assert trace.device.launch.tolist() == [0]
    assert trace.device.stream.tolist() == [0]
    assert trace.device.device.tolist() == [2]
    assert trace.device.size_bytes.tolist() == [12]


def test_device_and_stream_come_from_the_lane_if_arguments_lack_them(read: Any) -> None:
    events = [*ops(1), span("kernel", "k", 1, 1, pid=3, tid=9), span("Kernel", "k", 3, 1, pid="x")]
    trace = read(events)
    assert trace.device.device.tolist() == [3, -1]
    assert trace.device.stream.tolist() == [9, 1]


def test_stream_zero_is_a_stream_and_minus_one_is_the_lane_s(read: Any) -> None:
    trace = read([kernel("a", 1, 1, stream=0), kernel("b", 2, 1, stream=-1)])
    assert trace.device.stream.tolist() == [0, 7]


def test_lanes_may_be_named_in_text_or_negative(read: Any) -> None:
    events = [
        thread_name(-1, 0, "overheads"),
        thread_name("host", "main thread", "pt_main_thread"),
        span("overhead", "Buffer Flush", 1, 5, pid=-1, tid=0),
        span("cpu_op", "aten::add", 1, 5, pid="host", tid="main thread"),
    ]
    trace = read(events)
    assert {(t.pid, t.tid, t.name) for t in trace.threads} == {
        ("-1", "0", "overheads"),
        ("host", "main thread", "pt_main_thread"),
    }


def test_one_graph_launch_starts_many_kernels(read: Any) -> None:
    nodes = [kernel(f"k{i}", 10 + i, 1, 99, **{"graph node id": 500 + i}) for i in range(20)]
    trace = read([call("cudaGraphLaunch", 0, 5, 99), *nodes, kernel("before", 3, 1, 1)])
    assert (trace.device.launch == 0).sum() == 20
    assert sorted(trace.device.graph_node.tolist()) == [-1, *range(500, 520)]
    [note] = trace.quality
    assert (note.id, note.count) == ("unlinked", 1)


def test_collectives_keep_the_profilers_arguments(read: Any) -> None:
    args = {
        "Collective name": "allreduce",
        "In msg nelems": 1024,
        "Out msg nelems": "1024",
        "Group size": 8,
        "dtype": "BFloat16",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1, ...]",
        "In split size": "[]",
        "Seq": 7,
        "Src Rank": None,
    }
    trace = read([kernel("ncclDevKernel_AllReduce", 1, 5, 3, **args), kernel("gemm", 2, 1, 4)])
    [known] = trace.collectives
    assert trace.device.collective.tolist() == [0, -1]
    assert (known.name, known.in_elements, known.out_elements) == ("allreduce", 1024, 1024)
    assert (known.group, known.group_size, known.sequence) == ("0", 8, 7)
    assert (known.dtype, known.group_ranks, known.source_rank) == ("BFloat16", "[0, 1, ...]", -1)


def test_operators_keep_shapes_types_and_sequence(read: Any) -> None:
    args = {
        "Input Dims": [[32, 256], [256, 256]],
        "Input type": ["float", "float"],
        "Sequence number": 17,
        "Fwd thread id": 1,
    }
    trace = read([op("aten::mm", 1, 5, **args), op("bare", 9, 1)])
    host = trace.host
    assert trace.strings[host.shapes[0]] == "[[32, 256], [256, 256]]"
    assert trace.strings[host.dtypes[0]] == '["float", "float"]'
    assert host.shapes[1] == host.dtypes[1] == -1
    assert host.sequence.tolist() == [17, -1]
    assert host.forward_thread.tolist() == [1, -1]


@pytest.mark.parametrize("piece_bytes", [500, 512 << 10])
def test_every_call_keeps_its_own_inputs_however_similar_calls_are(
    read: Any, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(columns, "_MAX_SIGNATURES", 20)
    inputs = [
        (shapes, dtypes, strides, concrete)
        for shapes in (None, "[[2, 3]]", "[[3, 2]]")
        for dtypes in (None, '["float"]', '["double"]')
        for strides in (None, "[[3, 1]]")
        for concrete in (None, '["1"]', '["float"]')
    ] * 2
    keys = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
    events = [
        op(
            "aten::x",
            start,
            1,
            **{key: json.loads(text) for key, text in zip(keys, each, strict=True) if text},
        )
        for start, each in enumerate(inputs)
    ]
    trace = read(events)
    host = trace.host
    found = (host.shapes, host.dtypes, host.strides, host.concrete)
    told = [[trace.strings[code] if code >= 0 else None for code in column] for column in found]
    assert list(zip(*told, strict=True)) == inputs


def test_memory_instants_keep_the_order_of_one_instant(read: Any) -> None:
    events = [*ops(1)]
    for i in range(100):
        events += [memory(50, 8, **{"Total Allocated": 8 + i}), memory(50, -8)]
    failed = memory(60, 1 << 40) | {"name": "[OutOfMemory]"}
    moved = read([*events, failed]).memory
    assert moved.size_bytes.tolist() == [8, -8] * 100
    assert moved.allocated_bytes[::2].tolist() == [8 + i for i in range(100)]
    assert set(moved.device_type.tolist()) == {1}


def test_flows_of_old_files_link_kernels_without_correlation(read: Any) -> None:
    for category in ("async_gpu", "async_cpu_to_gpu", "ac2g"):
        for ids in ((1, 2), ("0x1f", "0x2e"), ("7", "8")):
            events = [
                span("Runtime", "cudaLaunchKernel", 0, 4),
                span("Runtime", "cudaLaunchKernel", 10, 4),
                span("Kernel", "k1", 20, 4, pid=0, tid=7),
                span("Kernel", "k2", 30, 4, pid=0, tid=7),
                flow("s", category, ids[0], 0),
                flow("f", category, ids[0], 30, pid=0, tid=7),
                flow("s", category, ids[1], 10),
                flow("f", category, ids[1], 20, pid=0, tid=7),
                flow("f", category, "lost", 30, pid=0, tid=7),
                flow("s", category, "other", 10),
            ]
            assert read(events).device.launch.tolist() == [1, 0]


def test_numbers_beyond_their_column_are_absent_not_wrapped(read: Any) -> None:
    events = [
        kernel("k", 1, 1, 2**70, stream=2**40, device=1e300, bytes=-(2**80)),
        op("a", 1, 1, **{"Sequence number": 2**63}),
        op("b", 3, 1, **{"Sequence number": 1e30}),
        op("c", 5, 1, **{"Sequence number": [1]}),
    ]
    trace = read(events)
    device = trace.device
    assert (device.correlation[0], device.size_bytes[0]) == (-1, -1)
    assert (device.stream[0], device.device[0]) == (7, 0)
    assert trace.host.sequence.tolist() == [-1, -1, -1]


def test_columns_are_read_only_like_those_of_the_cache(read: Any) -> None:
    trace = read([*ops(3), kernel("k", 1, 1)])
    for column in (trace.host.start_ns, trace.host.parent, trace.device.launch):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0


# Columns that grow by pieces.


def repeated(value: int, count: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.broadcast_to(np.int32(value), count)


def finished(*pieces: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    table = EventTable()
    for piece in pieces:
        table.add(x=piece)
    return table.finish(x=np.int32)["x"]


def test_pieces_are_appended_in_order() -> None:
    pieces = [np.arange(count, dtype=np.int32) for count in (3, 1, 0, 50, 2)]
    assert finished(*pieces).tolist() == np.concatenate(pieces).tolist()
    assert finished().dtype == np.int32


def test_one_value_in_all_rows_takes_no_memory() -> None:
    column = finished(repeated(7, 3), repeated(7, 5))
    assert column.tolist() == [7] * 8
    assert is_constant(column)


def test_a_second_value_gives_every_row_its_own() -> None:
    for other in (repeated(8, 2), np.array([7, 9], np.int32)):
        column = finished(repeated(7, 3), repeated(7, 1), other, repeated(7, 2))
        assert column.tolist() == [7] * 4 + other.tolist() + [7] * 2
        assert column.dtype == np.int32


def test_a_column_can_be_read_while_it_grows() -> None:
    table = EventTable()
    assert len(table.column("x")) == 0
    table.add(x=np.array([1]))
    table.add(x=np.array([2, 3]))
    assert table.column("x").tolist() == [1, 2, 3]
