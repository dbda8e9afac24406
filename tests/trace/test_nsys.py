"""What is read from an Nsight Systems export, and what is said of one that cannot be read."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_export import (
    BACKWARD,
    DRIVER,
    GRAPH,
    KERNEL,
    MAIN,
    MEMCPY,
    NEW,
    NVTX,
    OLD,
    RUNTIME,
    SESSION_START_NS,
    SYNC,
    Export,
    process,
    small,
    thread,
)
from stepscope.errors import UnreadableInputError
from stepscope.records.trace import Device, DeviceKind, HostKind, Trace
from stepscope.trace import links
from stepscope.trace.cache import find_inconsistency
from stepscope.trace.formats import sqlite
from stepscope.trace.formats.nsys import read_nsys
from stepscope.trace.formats.nsys_tables import call_name, copy_name, parse_range, sync_name
from stepscope.trace.formats.plausible_values import OddValues
from stepscope.trace.read import read_trace

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.sqlite"


def host_rows(trace: Trace, base_ns: int = SESSION_START_NS) -> dict[str, tuple[Any, ...]]:
    host = trace.host
    return {
        trace.strings[host.name[row]]: (
            HostKind(host.kind[row]),
            int(trace.threads[host.thread[row]].tid),
            int(host.start_ns[row]) - base_ns,
            int(host.dur_ns[row]),
        )
        for row in range(len(host))
    }


def device_rows(trace: Trace, base_ns: int = SESSION_START_NS) -> dict[str, tuple[Any, ...]]:
    device = trace.device
    return {
        trace.strings[device.name[row]]: (
            DeviceKind(device.kind[row]),
            int(device.stream[row]),
            int(device.start_ns[row]) - base_ns,
            int(device.dur_ns[row]),
        )
        for row in range(len(device))
    }


def host_row(trace: Trace, name: str) -> int:
    return int(np.flatnonzero(trace.host.name == trace.strings.index(name))[0])


def device_row(trace: Trace, name: str) -> int:
    return int(np.flatnonzero(trace.device.name == trace.strings.index(name))[0])


def notes(trace: Trace) -> dict[str, int | None]:
    return {note.id: note.count for note in trace.quality}


def refusal(path: Path) -> str:
    with pytest.raises(UnreadableInputError) as caught:
        read_nsys(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


HOST = {
    "ProfilerStep#1": (HostKind.ANNOTATION, 101, 1000, 8000),
    "iteration": (HostKind.ANNOTATION, 101, 1050, 7450),
    "aten::addmm": (HostKind.OPERATOR, 101, 1100, 900),
    "AddmmBackward0": (HostKind.OPERATOR, 102, 5000, 1000),
    "cudaLaunchKernel": (HostKind.RUNTIME, 101, 1200, 100),
    "cudaMemcpyAsync": (HostKind.RUNTIME, 101, 2100, 100),
    "cudaMemsetAsync": (HostKind.RUNTIME, 101, 2300, 50),
    "cudaStreamSynchronize": (HostKind.RUNTIME, 101, 2400, 1600),
    "cudaLaunchKernelExC": (HostKind.RUNTIME, 102, 5100, 100),
}
DEVICE = {
    "void gemm<float>(float*)": (DeviceKind.KERNEL, 7, 1500, 1000),
    "Memcpy HtoD (Pageable -> Device)": (DeviceKind.MEMCPY, 7, 2600, 400),
    "Memset (Device)": (DeviceKind.MEMSET, 7, 3100, 100),
    "Stream Sync": (DeviceKind.SYNC, -1, 2450, 1450),
    "ncclDevKernel_AllReduce": (DeviceKind.KERNEL, 13, 5500, 1000),
}


def test_every_event_is_read_exactly_at_absolute_time(file: Path) -> None:
    trace = read_nsys(small().write(file))
    assert host_rows(trace) == HOST
    assert device_rows(trace) == DEVICE
    assert (trace.kind, trace.format, trace.quality) == ("cuda", "nsys", ())
    assert trace.events == len(HOST) + len(DEVICE) + 1  # and the mark


def test_old_schema_gives_the_same_events_at_relative_time(file: Path) -> None:
    trace = read_nsys(small().write(file, OLD))
    assert host_rows(trace, 0) == HOST
    assert device_rows(trace, 0) == DEVICE
    assert trace.quality == ()
    assert trace.device_name == "NVIDIA H200"


def test_facts_of_the_export_are_read(file: Path) -> None:
    trace = read_nsys(small().write(file))
    assert trace.device_name == "NVIDIA H200"
    assert (trace.devices[0].memory_bytes, trace.devices[0].multiprocessors) == (150109880320, 132)
    assert trace.facts == {"EXPORT_SCHEMA_VERSION": "3.20.3"}
    assert [(t.pid, t.tid, t.name) for t in trace.threads] == [
        ("100", "101", "python3"),
        ("100", "102", "pt_autograd_0"),
    ]


def test_rank_comes_from_the_environment_and_nothing_else_does(file: Path) -> None:
    export = small()
    for value in ('RANK="3"', 'WORLD_SIZE="8"', 'TOKEN="secret"', 'LOCAL_RANK="1"'):
        export.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=value)
    trace = read_nsys(export.write(file))
    assert (trace.rank, trace.world_size) == (3, 8)
    assert "secret" not in repr(trace)


def test_sizes_grids_and_shapes_are_kept(file: Path) -> None:
    trace = read_nsys(small().write(file))
    copy, kernel = (device_row(trace, name) for name in list(DEVICE)[1::-1])
    assert trace.device.size_bytes[copy] == 4096
    assert trace.device.size_bytes[kernel] == trace.device.grid[copy] == -1
    assert trace.strings[trace.device.grid[kernel]] == "[4, 2, 1]"
    operator = host_row(trace, "aten::addmm")
    assert trace.strings[trace.host.shapes[operator]] == "[[8], [4, 16], [16, 8]]"
    assert trace.host.sequence[operator] == 12


def test_launches_are_linked_by_correlation(file: Path) -> None:
    trace = read_nsys(small().write(file))
    launched = {
        name: trace.strings[trace.host.name[trace.device.launch[device_row(trace, name)]]]
        for name in DEVICE
    }
    assert list(launched.values()) == [
        "cudaLaunchKernel",
        "cudaMemcpyAsync",
        "cudaMemsetAsync",
        "cudaStreamSynchronize",
        "cudaLaunchKernelExC",
    ]


def test_ranges_and_calls_nest(file: Path) -> None:
    trace = read_nsys(small().write(file))
    above = {
        name: trace.strings[trace.host.name[parent]] if parent >= 0 else None
        for name in HOST
        if (parent := trace.host.parent[host_row(trace, name)]) is not None
    }
    assert above["cudaLaunchKernel"] == "aten::addmm"
    assert above["aten::addmm"] == above["cudaMemcpyAsync"] == "iteration"
    assert above["iteration"] == "ProfilerStep#1"
    assert above["cudaLaunchKernelExC"] == "AddmmBackward0"
    assert above["ProfilerStep#1"] is above["AddmmBackward0"] is None


def test_backward_operator_finds_its_forward(file: Path) -> None:
    trace = read_nsys(small().write(file))
    forward = trace.host.forward_of[host_row(trace, "AddmmBackward0")]
    assert trace.strings[trace.host.name[forward]] == "aten::addmm"


def test_nearest_finds_the_step_and_operator_of_a_launch(file: Path) -> None:
    trace = read_nsys(small().write(file))
    operator = links.nearest(trace.host, trace.host.kind == HostKind.OPERATOR)
    step = links.nearest(trace.host, trace.host.name == trace.strings.index("ProfilerStep#1"))
    launch = trace.device.launch[device_row(trace, "void gemm<float>(float*)")]
    assert operator[launch] == host_row(trace, "aten::addmm")
    assert step[launch] == host_row(trace, "ProfilerStep#1")
    assert step[host_row(trace, "AddmmBackward0")] == -1


def test_read_trace_recognises_an_export(file: Path) -> None:
    assert read_trace(small().write(file), cache=False).format == "nsys"


def test_every_batch_is_read_and_progress_ends_at_the_file_size(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small().write(file)
    whole = read_nsys(file)
    monkeypatch.setattr(sqlite, "BATCH_ROWS", 2)
    told: list[tuple[int, int]] = []
    pieces = read_nsys(file, lambda done, total: told.append((done, total)))
    assert host_rows(pieces) == host_rows(whole)
    assert device_rows(pieces) == device_rows(whole)
    size = file.stat().st_size
    assert told[-1] == (size, size)
    assert told == sorted(told)


@pytest.mark.parametrize("table", sorted(set(small().tables) - {"StringIds"}))
def test_a_missing_table_takes_only_its_own_rows(file: Path, table: str) -> None:
    export = small()
    lost = len(export.tables.pop(table))
    trace = read_nsys(export.write(file))
    events = len(HOST) + len(DEVICE) + 1
    holds_events = table.startswith(("CUPTI", "NVTX"))
    assert trace.events == events - (lost if holds_events else 0)
    assert "malformed" not in notes(trace)


def test_export_with_ranges_alone_is_read(file: Path) -> None:
    export = small()
    for table in [name for name in export.tables if name.startswith("CUPTI")]:
        del export.tables[table]
    trace = read_nsys(export.write(file))
    assert len(trace.device) == 0
    assert set(host_rows(trace)) == {name for name in HOST if not name.startswith("cuda")}


def test_unknown_columns_are_ignored_and_other_spellings_read(file: Path) -> None:
    kernel = "colour START End DEVICEID streamId correlationId shortName"
    trace = read_nsys(small().write(file, NEW | {KERNEL: kernel}))
    # Without globalPid the work is of an unknown process, but its launches are found.
    assert trace.device.launch[device_row(trace, "short")] == host_row(trace, "cudaLaunchKernel")
    assert trace.quality == ()


def test_calls_without_a_thread_are_still_linked(file: Path) -> None:
    trace = read_nsys(small().write(file, NEW | {RUNTIME: "start end correlationId nameId"}))
    assert "unlinked" not in notes(trace)
    assert host_rows(trace)["cudaLaunchKernel"] == (HostKind.RUNTIME, -1, 1200, 100)


def test_driver_calls_are_runtime_calls(file: Path) -> None:
    export = small()
    names = {"nameId": export.string("cuLaunchKernel"), "correlationId": 77}
    export.add(DRIVER, start=1210, end=1290, globalTid=MAIN, **names)
    trace = read_nsys(export.write(file, OLD))
    assert host_rows(trace, 0)["cuLaunchKernel"] == (HostKind.RUNTIME, 101, 1210, 80)


def test_profiler_overhead_has_its_own_kind(file: Path) -> None:
    export = small()
    name = export.string("CUPTI Buffer flush")
    export.add("PROFILER_OVERHEAD", start=6000, end=7000, globalTid=MAIN, nameId=name)
    kind, *_ = host_rows(read_nsys(export.write(file)))["CUPTI Buffer flush"]
    assert kind == HostKind.OVERHEAD


def test_unfinished_and_backward_events_are_counted_and_left_out(file: Path) -> None:
    export = small()
    export.range("never closed", (1000, None), MAIN)
    export.range("reversed", (2000, 1000), MAIN)
    export.kernel("no time", (0, 0), 90)
    export.kernel("endless", (100, 100 + 2**60), 91)
    trace = read_nsys(export.write(file))
    assert host_rows(trace) == HOST
    assert device_rows(trace) == DEVICE
    assert {note.detail: note.count for note in trace.quality if note.id == "malformed"} == {
        "left out: 1 event without a usable start": 1,
        "left out: 1 event without an end": 1,
        "left out: 1 event with a negative duration": 1,
        "left out: 1 event longer than 100 days": 1,
    }


def test_values_of_other_types_are_absent(file: Path) -> None:
    export = small()
    export.range("text for a time", ("soon", 5000), MAIN)  # type: ignore[arg-type]
    export.device(MEMCPY, (7000, 7100), 0, copyKind="fast", bytes=b"\x00", streamId=0.5)
    trace = read_nsys(export.write(file))
    assert notes(trace)["malformed"] == 1
    copy = device_row(trace, "Memcpy Unknown (Unknown -> Unknown)")
    assert trace.device.size_bytes[copy] == -1


def test_lost_names_are_counted(file: Path) -> None:
    export = small()
    export.device(KERNEL, (7000, 7100), 0, demangledName=999_999)
    trace = read_nsys(export.write(file))
    assert notes(trace)["unnamed"] == 1
    assert device_rows(trace)["(unnamed)"] == (DeviceKind.KERNEL, 7, 7000, 100)


def test_whole_graphs_are_kernels_unless_their_nodes_are_there(file: Path) -> None:
    export = small()
    export.call("cudaGraphLaunch_v10000", (6600, 6700), MAIN, 6)
    export.call("cudaGraphLaunch_v10000", (7600, 7700), MAIN, 7)
    export.device(GRAPH, (6800, 7000), 6, graphId=4, graphExecId=5)
    export.device(GRAPH, (7800, 8000), 7, graphId=4, graphExecId=5)
    export.kernel("inside", (7800, 7900), 7, graphNodeId=8_589_934_592)
    trace = read_nsys(export.write(file))
    assert device_rows(trace)["CUDA graph 4"] == (DeviceKind.KERNEL, 7, 6800, 200)
    assert len(trace.device) == len(DEVICE) + 2
    assert trace.device.graph_node[device_row(trace, "inside")] == 8_589_934_592
    assert "unlinked" not in notes(trace)


def test_several_processes_without_device_work_are_noted(file: Path) -> None:
    export = Export()
    export.range("one", (10, 20), thread(1, 1))
    export.range("two", (10, 20), thread(2, 2))
    assert notes(read_nsys(export.write(file))) == {"several-processes": 2}


def two_processes() -> Export:
    export = small()
    export.call("cudaLaunchKernel_v7000", (1250, 1280), thread(200, 201), 1)
    export.kernel("other", (1600, 1700), 1, pid=200)
    operator = "aten::addmm, seq = 12, op_id = 3"
    export.range(operator, (5500, 5600), thread(200, 201))
    return export


def test_processes_with_equal_ids_are_kept_apart(file: Path) -> None:
    trace = read_nsys(two_processes().write(file))
    threads = [
        trace.threads[trace.host.thread[trace.device.launch[device_row(trace, name)]]]
        for name in ("void gemm<float>(float*)", "other")
    ]
    assert [one.pid for one in threads] == ["100", "200"]
    copy = trace.device.launch[device_row(trace, "Memcpy HtoD (Pageable -> Device)")]
    assert copy == host_row(trace, "cudaMemcpyAsync")
    forward = trace.host.forward_of[host_row(trace, "AddmmBackward0")]
    assert trace.threads[trace.host.thread[forward]].pid == "100"
    assert notes(trace) == {"several-processes": 2}


def test_work_of_an_unknown_process_is_linked_by_its_id_alone(file: Path) -> None:
    export = Export()
    export.call("cudaLaunchKernel_v7000", (10, 20), MAIN, 1)
    export.call("cudaLaunchKernelExC_v11060", (10, 20), thread(200, 201), 2)
    export.kernel("other", (30, 40), 2)
    columns = "start end deviceId streamId correlationId demangledName"
    trace = read_nsys(export.write(file, NEW | {KERNEL: columns}))
    launch = trace.device.launch[device_row(trace, "other")]
    assert launch == host_row(trace, "cudaLaunchKernelExC")


def test_a_second_process_without_device_work_needs_no_note(file: Path) -> None:
    export = small()
    export.range("launcher", (0, 9500), thread(50, 50))
    trace = read_nsys(export.write(file))
    assert "launcher" in host_rows(trace)
    assert trace.quality == ()


def test_rank_is_unknown_when_several_processes_share_the_export(file: Path) -> None:
    export = two_processes()
    export.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value='RANK="0"')
    assert read_nsys(export.write(file)).rank is None


def test_devices_are_numbered_as_the_machine_does(file: Path) -> None:
    export = two_processes()
    export.tables["TARGET_INFO_CUDA_DEVICE"] = [
        {"gpuId": 2, "cudaId": 0, "pid": 100},
        {"gpuId": 5, "cudaId": 0, "pid": 200},
    ]
    trace = read_nsys(export.write(file))
    assert trace.device.device[device_row(trace, "void gemm<float>(float*)")] == 2
    assert trace.device.device[device_row(trace, "other")] == 5


def test_times_that_are_absolute_already_stay(file: Path) -> None:
    export = small()
    for table, rows in export.tables.items():
        if table.startswith(("CUPTI", "NVTX")):
            for row in rows:
                row["start"] += SESSION_START_NS
                row["end"] = row["end"] and row["end"] + SESSION_START_NS
    assert device_rows(read_nsys(export.write(file))) == DEVICE


@pytest.mark.parametrize(
    ("text", "name", "kind"),
    [
        ("aten::mm", "aten::mm", HostKind.OPERATOR),
        ("detach, op_id = 4, sizes = [[]]", "detach", HostKind.OPERATOR),
        ("MyFunction, seq = 7", "MyFunction", HostKind.OPERATOR),
        (
            "autograd::engine::evaluate_function: MulBackward0, op_id = 5",
            "autograd::engine::evaluate_function: MulBackward0",
            HostKind.OPERATOR,
        ),
        ("Optimizer.step#SGD.step, op_id = 6", "Optimizer.step#SGD.step", HostKind.ANNOTATION),
        ("cub::DeviceReduce::Sum", "cub::DeviceReduce::Sum", HostKind.ANNOTATION),
        ("load, seq = next, sizes = all", "load, seq = next, sizes = all", HostKind.ANNOTATION),
        ("ProfilerStep#2", "ProfilerStep#2", HostKind.ANNOTATION),
        ("日本, データ", "日本, データ", HostKind.ANNOTATION),
    ],
)
def test_range_texts_tell_operators_from_annotations(
    file: Path, text: str, name: str, kind: HostKind
) -> None:
    export = Export()
    export.range(text, (10, 20), MAIN)
    assert host_rows(read_nsys(export.write(file)), 0) == {name: (kind, 101, 10, 10)}


@given(
    name=st.text(min_size=1).filter(lambda text: ", " not in text),
    sequence=st.integers(0, 2**59) | st.none(),
    op_id=st.integers(1, 2**62) | st.none(),
    shapes=st.lists(st.lists(st.integers(0, 2**40))) | st.none(),
    inputs=st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 9)), min_size=1) | st.none(),
)
def test_texts_of_emit_nvtx_are_split_as_they_were_joined(
    name: str, sequence: int | None, op_id: int | None, shapes: Any, inputs: Any
) -> None:
    text = name
    text += "" if sequence is None else f", seq = {sequence}"
    text += "" if op_id is None else f", op_id = {op_id}"
    text += "" if shapes is None else f", sizes = {shapes}"
    text += "" if inputs is None or op_id is None else f", input_op_ids = {inputs}"
    told = ("" if sequence is None else str(sequence), "" if shapes is None else str(shapes))
    assert parse_range(text) == (name, *told)


@given(st.text())
def test_any_range_text_can_be_parsed(text: str) -> None:
    name, sequence, shapes = parse_range(text)
    assert text.startswith(name)
    assert not sequence or int(sequence) < 2**63
    assert not shapes or shapes in text


def test_copies_are_named_as_kineto_names_them() -> None:
    assert copy_name((8, 2, 2)) == "Memcpy DtoD (Device -> Device)"
    assert copy_name((2, 2, 1)) == "Memcpy DtoH (Device -> Pinned)"
    assert copy_name((10, 2, 2)) == "Memcpy PtoP (Device -> Device)"
    assert copy_name((99, -1, 7)) == "Memcpy Unknown (Unknown -> Unknown)"


def test_only_the_version_of_the_runtime_is_cut_from_names() -> None:
    assert call_name("cudaLaunchKernel_ptsz_v7000") == "cudaLaunchKernel_ptsz"
    assert call_name("cudaGraphLaunch_v10000") == "cudaGraphLaunch"
    assert call_name("cuMemcpyHtoDAsync_v2") == "cuMemcpyHtoDAsync_v2"


def test_waits_are_named_after_their_calls() -> None:
    calls = ("cudaStreamWaitEvent", "cudaEventSynchronize", "cudaDeviceSynchronize", "cuInit")
    assert [sync_name(call) for call in calls] == [
        "Stream Wait Event",
        "Event Sync",
        "Context Sync",
        "Unknown Sync",
    ]


def test_a_wait_without_calls_is_still_read(file: Path) -> None:
    export = Export()
    export.device(SYNC, (10, 20), 1)
    export.range("step", (0, 30), MAIN)
    assert "Unknown Sync" in device_rows(read_nsys(export.write(file)), 0)


def test_database_of_another_tool_is_named_by_its_tables(file: Path) -> None:
    with closing(sqlite3.connect(file)) as other, other:
        other.execute("CREATE TABLE users (id INTEGER)")
        other.execute("CREATE TABLE orders (id INTEGER)")
    assert "orders, users" in refusal(file)


def test_nvprof_database_is_refused_with_the_way_out(file: Path) -> None:
    with closing(sqlite3.connect(file)) as other, other:
        other.execute("CREATE TABLE StringTable (_id_ INTEGER, value TEXT)")
        other.execute(f"CREATE TABLE {KERNEL} (start INT, end INT)")
    assert "nsys profile" in refusal(file)


def test_export_without_cuda_and_nvtx_says_what_to_record(file: Path) -> None:
    export = Export()
    export.string("only a string")
    assert "--trace cuda,nvtx" in refusal(export.write(file))


@pytest.mark.parametrize("schema", [OLD, NEW])
def test_export_without_events_is_refused(file: Path, schema: dict[str, str]) -> None:
    export = Export({table: [] for table in schema})
    assert "holds no CUDA calls" in refusal(export.write(file, schema))


def test_export_of_marks_alone_is_refused(file: Path) -> None:
    export = Export()
    export.range("mark", (10, None), MAIN, eventType=34)
    assert "holds no CUDA calls" in refusal(export.write(file))


def test_export_of_unusable_events_says_why(file: Path) -> None:
    export = Export()
    export.range("open", (10, None), MAIN)
    assert "none of its events (1) is usable (1 without an end)" in refusal(export.write(file))


def test_export_without_any_name_is_refused(file: Path) -> None:
    export = small()
    del export.tables["StringIds"], export.tables[NVTX], export.tables["ThreadNames"]
    for table in (MEMCPY, "CUPTI_ACTIVITY_KIND_MEMSET", SYNC):
        del export.tables[table]
    assert "StringIds" in refusal(export.write(file))


@pytest.mark.parametrize("content", [b"", b"\xff" * 5000])
def test_what_only_looks_like_a_database_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(b"SQLite format 3\x00" + content)
    assert "nsys export --type sqlite" in refusal(file)


@pytest.mark.parametrize("name", ["run.nsys-rep", "run.qdrep", "report"])
def test_a_report_is_refused_with_the_export_command(tmp_path: Path, name: str) -> None:
    report = tmp_path / name
    report.write_bytes(b"NVIDIA Tegra Profiler Report 36398880.\n\x0bLocal (CLI)")
    with pytest.raises(UnreadableInputError, match=f"nsys export --type sqlite .*{name}"):
        read_trace(report)


def test_a_path_with_odd_characters_is_opened(tmp_path: Path) -> None:
    assert read_nsys(small().write(tmp_path / "a?b#c %20.sqlite")).events


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


def changed(path: Path, *statements: str) -> Path:
    """The export of `small` after these."""
    small().write(path)
    with closing(sqlite3.connect(path)) as export, export:
        for statement in statements:
            export.execute(statement)
    return path


@pytest.mark.parametrize("called_a_table", [False, True])
def test_a_view_that_never_ends_is_left_out_and_reported(file: Path, called_a_table: bool) -> None:
    view = f"CREATE VIEW {KERNEL} AS {ENDLESS} SELECT i AS start, i + 1 AS end FROM n"
    called = "UPDATE sqlite_master SET type = 'table' WHERE type = 'view'"
    lie = ("PRAGMA writable_schema=ON", called) if called_a_table else ()
    trace = read_nsys(changed(file, f"DROP TABLE {KERNEL}", view, *lie))
    [note] = [note for note in trace.quality if note.id == "computed-tables"]
    assert KERNEL in note.detail
    assert set(device_rows(trace)) == set(DEVICE) - {
        "void gemm<float>(float*)",
        "ncclDevKernel_AllReduce",
    }


def test_an_export_of_views_alone_is_refused(file: Path) -> None:
    with closing(sqlite3.connect(file)) as export, export:
        export.execute(f"CREATE VIEW {KERNEL} AS {ENDLESS} SELECT i AS start, i AS end FROM n")
    assert "only plain tables are read" in refusal(file)


def test_a_view_that_the_list_of_tables_calls_a_table_is_not_run(file: Path) -> None:
    view = f"CREATE VIEW {NVTX} AS {ENDLESS} SELECT i AS start, i AS end, 59 AS eventType FROM n"
    lie = f"UPDATE sqlite_master SET sql = '{view}' WHERE name = '{NVTX}'"
    trace = read_nsys(changed(file, "PRAGMA writable_schema=ON", lie))
    assert {"ProfilerStep#1", "aten::addmm"}.isdisjoint(host_rows(trace))
    assert "computed-tables" in notes(trace)


def test_a_view_under_the_name_of_a_table_with_another_name_is_not_run(file: Path) -> None:
    view = f"CREATE VIEW {NVTX} AS {ENDLESS} SELECT i AS start, i AS end, 59 AS eventType FROM n"
    renamed = view.replace(NVTX, "hidden", 1)
    moved = f"UPDATE sqlite_master SET sql = replace(sql, '{NVTX}', 'moved') WHERE name = '{NVTX}'"
    lie = f"UPDATE sqlite_master SET sql = '{view}' WHERE name = 'hidden'"
    changed(file, renamed, "PRAGMA writable_schema=ON", moved, lie)
    trace = read_nsys(file)
    assert "aten::addmm" not in host_rows(trace)


def test_virtual_tables_and_computed_columns_are_not_run(file: Path) -> None:
    columns = "start, end, eventType, text, globalTid, textId"
    virtual = f"CREATE VIRTUAL TABLE {NVTX} USING fts5({columns})"
    bytes_ = f"ALTER TABLE {MEMCPY} DROP COLUMN bytes"
    heavy = f"ALTER TABLE {MEMCPY} ADD COLUMN bytes AS (length(zeroblob(1000000000)))"
    trace = read_nsys(changed(file, f"DROP TABLE {NVTX}", virtual, bytes_, heavy))
    assert notes(trace)["computed-tables"] == 1
    copy = device_row(trace, "Memcpy HtoD (Pageable -> Device)")
    assert trace.device.size_bytes[copy] == -1


def test_triggers_indices_and_tables_without_rowids_are_read_past(file: Path) -> None:
    trigger = f"CREATE TRIGGER t AFTER INSERT ON {KERNEL} BEGIN DELETE FROM {KERNEL}; END"
    index = f"CREATE INDEX i ON {KERNEL} (end DESC, start, deviceId, streamId, correlationId)"
    keyed = "CREATE TABLE keyed (start, end, globalTid, correlationId, nameId, PRIMARY KEY (start))"
    changed(file, trigger, index, f"{keyed} WITHOUT ROWID")
    with closing(sqlite3.connect(file)) as export, export:
        names = "start, end, globalTid, correlationId, nameId"
        export.execute(f"INSERT INTO keyed SELECT {names} FROM {RUNTIME}")
        export.execute(f"DROP TABLE {RUNTIME}")
        export.execute(f"ALTER TABLE keyed RENAME TO {RUNTIME}")
    trace = read_nsys(file)
    assert host_rows(trace) == HOST
    assert device_rows(trace) == DEVICE
    assert trace.quality == ()


@pytest.mark.parametrize("rows_at_once", [2, 7, 20_000])
def test_pages_that_repeat_give_no_more_rows_than_the_file_has_room_for(
    file: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr(sqlite, "BATCH_ROWS", rows_at_once)
    content = long().write(file, page_bytes=1024).read_bytes()
    rows = read_nsys(file).events
    # Every inner page of the tables points to its first child again and again.
    spoilt = bytearray(content)
    for at in range(1024, len(content), 1024):
        if content[at] == 5:  # an inner page of a table
            cells = int.from_bytes(content[at + 3 : at + 5], "big")
            places = [int.from_bytes(content[at + 12 + 2 * i :][:2], "big") for i in range(cells)]
            for place in places:
                spoilt[at + place : at + place + 4] = content[at + places[0] : at + places[0] + 4]
    file.write_bytes(bytes(spoilt))
    assert read_nsys(file).events <= 2 * rows
    with closing(sqlite.Database(file)) as opened:
        opened._size_bytes = 60  # a file with room for ten rows
        assert len(opened._all(KERNEL, f"SELECT start FROM {KERNEL}")) <= 10
        assert opened.damaged == {KERNEL: "more rows than the file has room for"}


def test_rows_whose_numbers_do_not_ascend_end_the_table(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BATCH_ROWS", 2)
    monkeypatch.setattr(sqlite.Database, "_piece", lambda *_: (5, [[1, 2], [3, 4]]))
    columns = {"start": 9, "end": 9}
    with closing(sqlite.Database(small().write(file))) as opened:
        batches = list(opened.batches(KERNEL, columns, OddValues()))
        assert len(batches) == 2
        assert opened.damaged == {KERNEL: "its rows are not in the order of their numbers"}


def test_a_query_that_goes_on_and_on_is_given_up(file: Path) -> None:
    with closing(sqlite.Database(small().write(file))) as opened:
        opened._connection.set_authorizer(None)
        joined = ", ".join(f"{RUNTIME} AS t{i}" for i in range(12))
        assert opened._all("joined", f"SELECT max(t0.start) FROM {joined}") == []
        assert opened.damaged == {"joined": "interrupted"}


def test_more_text_than_the_file_has_room_for_is_not_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_MIN_TEXT_BYTES", 0)
    with closing(sqlite.Database(small().write(file))) as opened:
        opened._text_bytes_left = 30
        assert len(opened.records("StringIds", "id", "value")) < 3
        assert opened.damaged == {"StringIds": "more text than the file has room for"}


def test_long_texts_are_cut_and_reported(file: Path) -> None:
    export = small()
    export.range("x" * 100_000, (1000, 1010), MAIN)
    trace = read_nsys(export.write(file))
    assert notes(trace) == {"cut-texts": 1}
    assert "x" * sqlite.MAX_CHARACTERS in trace.strings


ODD = [-1 << 63, -5, 1 << 62, (1 << 63) - 1, "text", b"blob", 0.5, float("inf"), ""]


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize(
    ("table", "column"),
    [
        (MEMCPY, "bytes"),
        (MEMCPY, "deviceId"),
        (KERNEL, "correlationId"),
        (KERNEL, "gridY"),
        (KERNEL, "streamId"),
        (RUNTIME, "correlationId"),
        (NVTX, "eventType"),
    ],
)
def test_a_value_that_cannot_be_true_is_counted_and_not_captured(
    file: Path, table: str, column: str, value: Any
) -> None:
    export = small()
    export.tables[table][-1][column] = value
    trace = read_nsys(export.write(file))
    last = len(export.tables[table])
    assert [note.count for note in trace.quality if note.id == "odd-values"] == [1]
    [note] = [note for note in trace.quality if note.id == "odd-values"]
    assert f"{table}.{column}" in note.detail
    assert f"row {last}" in note.detail
    assert find_inconsistency(trace) is None


def test_odd_values_of_every_batch_are_counted_together(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BATCH_ROWS", 3)
    export = small()
    for at in range(10):
        export.device(MEMCPY, (7000 + at, 7001 + at), 0, bytes=-2 if at % 2 else "no")
    trace = read_nsys(export.write(file))
    [note] = [note for note in trace.quality if note.id == "odd-values"]
    assert note.count == 10
    assert "such as no in row 2" in note.detail


def test_missing_names_of_ranges_are_counted(file: Path) -> None:
    export = small()
    export.range(None, (1000, 1010), MAIN, textId=999_999)
    assert notes(read_nsys(export.write(file))) == {"unnamed": 1}


def test_devices_that_cannot_be_are_not_captured(file: Path) -> None:
    export = small()
    export.tables["TARGET_INFO_GPU"] = [
        {"id": 0, "name": b"\xff", "totalMemory": -1 << 60, "smCount": "many"}
    ]
    trace = read_nsys(export.write(file))
    assert trace.devices == (Device(id=0, name=""),)
    assert [note.id for note in trace.quality] == ["odd-values"] * 2


def test_an_impossible_world_is_not_captured(file: Path) -> None:
    export = small()
    export.add("META_DATA_CAPTURE", name="ENVIRONMENT_VARIABLE", value="WORLD_SIZE=999999999")
    assert read_nsys(export.write(file)).world_size is None


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
def test_a_log_next_to_the_file_is_reported(file: Path, suffix: str) -> None:
    small().write(file)
    file.with_name(file.name + suffix).write_bytes(b"log")
    assert notes(read_nsys(file)) == {"unfinished-export": None}


def test_a_file_in_write_ahead_mode_is_read_without_its_log(file: Path) -> None:
    changed(file)
    with closing(sqlite3.connect(file)) as export:
        export.execute("PRAGMA journal_mode=WAL")
    assert file.read_bytes()[18:20] == b"\x02\x02"
    before = sorted(file.parent.iterdir())
    assert device_rows(read_nsys(file)) == DEVICE
    assert sorted(file.parent.iterdir()) == before


def test_a_locked_file_is_read(file: Path) -> None:
    small().write(file)
    with closing(sqlite3.connect(file)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        assert device_rows(read_nsys(file)) == DEVICE


def test_two_columns_of_one_name_are_one(file: Path) -> None:
    change = """UPDATE sqlite_master SET sql = replace(sql, '"contextId"', '"end"')"""
    trace = read_nsys(changed(file, "PRAGMA writable_schema=ON", change))
    assert set(host_rows(trace)) == set(HOST)


def test_a_column_named_like_the_row_number_is_not_the_row_number(file: Path) -> None:
    columns = NEW[KERNEL].replace("contextId", "_rowid_").replace("greenContextId", "rowid")
    assert device_rows(read_nsys(small().write(file, NEW | {KERNEL: columns}))) == DEVICE


def long() -> Export:
    """Enough rows that every table covers several pages, its rows in the order of time."""
    export = small()
    for step in range(400):
        start = 10_000 + step * 100
        export.range(f"aten::mul, seq = {step}, op_id = {step}", (start, start + 90), MAIN)
        export.call("cudaLaunchKernel_v7000", (start + 10, start + 20), MAIN, 100 + step)
        export.kernel(f"kernel {step % 7}", (start + 30, start + 80), 100 + step)
    return export


def test_a_cut_export_keeps_every_row_before_the_cut(file: Path) -> None:
    content = long().write(file, page_bytes=1024).read_bytes()
    whole = read_nsys(file)
    kernels = set()
    for tenths in range(3, 10):
        file.write_bytes(content[: len(content) * tenths // 10])
        trace = read_nsys(file)
        said = next(note.detail for note in trace.quality if note.id == "truncated")
        assert any(f"table {table}: " in said for table in (KERNEL, RUNTIME, NVTX))
        assert 0 < trace.events < whole.events
        kernels.add(int((trace.device.kind == DeviceKind.KERNEL).sum()))
    assert any(0 < count < 402 for count in kernels)


def test_a_cut_before_the_first_event_is_refused(file: Path) -> None:
    content = long().write(file, page_bytes=1024).read_bytes()
    file.write_bytes(content[:1500])
    assert "damaged" in refusal(file)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Flips, overwritten stretches and cuts."""
    spoilt = bytearray(content)
    for _ in range(chance.randint(1, 8)):
        place = chance.randrange(16, len(spoilt))
        if chance.random() < 0.5:
            spoilt[place] = chance.randrange(256)
        else:
            spoilt[place : place + 40] = chance.randbytes(len(spoilt[place : place + 40]))
    if chance.random() < 0.3:
        del spoilt[chance.randrange(16, len(spoilt)) :]
    return bytes(spoilt)


@pytest.mark.parametrize("seed", range(8))
def test_damage_anywhere_is_noted_or_refused_and_never_crashes(file: Path, seed: int) -> None:
    content = long().write(file, page_bytes=512).read_bytes()
    chance = random.Random(seed)
    read = 0
    for _ in range(40):
        file.write_bytes(damaged(content, chance))
        try:
            trace = read_nsys(file)
        except UnreadableInputError:
            continue
        read += 1
        assert (trace.host.dur_ns >= 0).all()
        assert (trace.device.dur_ns >= 0).all()
        assert trace.host.parent.max(initial=-1) < len(trace.host)
        assert trace.device.launch.max(initial=-1) < len(trace.host)
        assert trace.host.name.max(initial=-1) < len(trace.strings)
    assert read >= 4


def test_global_ids_decode_to_process_and_thread(file: Path) -> None:
    export = Export()
    export.range("far", (1, 2), process(0xABCDEF) | 0x123456)
    trace = read_nsys(export.write(file))
    assert (trace.threads[0].pid, trace.threads[0].tid) == (str(0xABCDEF), str(0x123456))
    assert BACKWARD - MAIN == 1
