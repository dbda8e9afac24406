"""The border: values of a trace that cannot be true are counted, shown, and taken as absent."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from kineto_events import call, kernel, memory, op

from stepscope import explain, read_trace
from stepscope.records.trace import ABSENT
from stepscope.trace.formats.plausible_values import are_shapes, are_texts, is_grid, rank_list

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepscope.records.trace import Trace

    Write = Callable[..., Path]

HUGE = 2**62


def read(write_trace: Write, *events: dict[str, Any], **head: Any) -> Trace:
    path = write_trace(list(events))
    if head:
        path.write_text(json.dumps({**head, "traceEvents": events}))
    return read_trace(path, cache=False)


def odd(trace: Trace) -> dict[str, int | None]:
    """Field -> how many of its values were left out."""
    notes = [note for note in trace.quality if note.id == "odd-values"]
    return {note.detail.partition(":")[0]: note.count for note in notes}


@pytest.mark.parametrize(
    "shapes",
    [[[HUGE]], [[2**30, 2**30]], [[-1, 2]], [[1.5]], [["2"]], [[True]], [[[-1]]], [[1] * 65], ["x"],
     {"a": 1}, "[[1]]", 7],
)  # fmt: skip
def test_shapes_that_no_tensor_has_are_not_captured(write_trace: Write, shapes: Any) -> None:
    trace = read(
        write_trace,
        op("aten::mm", 0, 5, **{"Input Dims": shapes}),
        op("aten::mm", 10, 5, **{"Input Dims": [[2, 3], [3, 4]]}),
    )
    assert trace.host.shapes[0] == ABSENT
    assert json.loads(trace.strings[trace.host.shapes[1]]) == [[2, 3], [3, 4]]
    assert odd(trace) == {"Input Dims": 1}


@pytest.mark.parametrize(
    "text", ["[]", "[[]]", "[[2, 3], []]", "[[0, 5]]", "[[[2], [3, 4]], []]", "[[17592186044416]]"]
)
def test_shapes_that_tensors_have_pass(text: str) -> None:
    assert are_shapes(text.encode())


def test_an_example_and_its_place_are_shown(write_trace: Write) -> None:
    trace = read(write_trace, op("aten::mm", 0, 5, **{"Input Dims": [[-7]]}), op("a", 9, 1))
    (note,) = trace.quality
    assert note.detail == (
        "Input Dims: 1 value that cannot be true, such as [[-7]] in aten::mm; "
        "they count as not captured"
    )


def test_texts_that_do_not_fit_their_column_are_not_captured(write_trace: Write) -> None:
    trace = read(
        write_trace,
        op("aten::mm", 0, 5, **{"Input type": [1], "Concrete Inputs": {"a": 2}}),
        call("cudaLaunchKernel", 1, 1, 3),
        kernel("k", 2, 3, 3, grid=[0, 1, 1]),
        kernel("k", 7, 3, grid=[2**40]),
    )
    assert (trace.host.dtypes == ABSENT).all()
    assert (trace.host.concrete == ABSENT).all()
    assert (trace.device.grid == ABSENT).all()
    assert odd(trace) == {"Input type": 1, "Concrete Inputs": 1, "grid": 2}


def test_deep_nesting_is_neither_a_list_of_texts_nor_a_grid() -> None:
    deep = b"[" * 5000 + b"]" * 5000
    assert not are_texts(deep)
    assert not is_grid(deep)
    assert not are_shapes(deep)


@pytest.mark.parametrize(
    ("field", "value", "column"),
    [("bytes", HUGE, "size_bytes"), ("bytes", -2, "size_bytes"), ("device", 10**6, "device"),
     ("graph node id", "9" * 40, "graph_node"), ("bytes", [1], "size_bytes")],
)  # fmt: skip
def test_numbers_beyond_their_meaning_are_not_captured(
    write_trace: Write, field: str, value: Any, column: str
) -> None:
    event = kernel("k", 2, 3)
    event["args"][field] = value
    trace = read(write_trace, op("a", 0, 9), event)
    assert getattr(trace.device, column)[0] == ABSENT
    assert sum(filter(None, odd(trace).values())) == 1


def test_a_missing_stream_or_number_is_not_reported_as_odd(write_trace: Write) -> None:
    trace = read(write_trace, op("a", 0, 9), kernel("k", 2, 3, stream=4294967295, bytes=None))
    assert odd(trace) == {}


def test_an_allocation_larger_than_any_memory_moves_nothing(write_trace: Write) -> None:
    trace = read(write_trace, op("a", 0, 9), memory(1, 2**60), memory(2, 4096))
    assert trace.memory.size_bytes.tolist() == [0, 4096]
    assert odd(trace) == {"Bytes": 1}


def test_arguments_of_collectives_stay_within_their_meaning(write_trace: Write) -> None:
    said = {
        "Collective name": "allreduce",
        "In msg nelems": HUGE,
        "Out msg nelems": 8,
        "Group size": -5,
        "Process Group Ranks": "[0, 0]",
        "Src Rank": 2**40,
        "Seq": 3,
    }
    trace = read(write_trace, op("record_param_comms", 0, 9, **said))
    (told,) = trace.collectives
    assert (told.in_elements, told.out_elements, told.group_size) == (ABSENT, 8, ABSENT)
    assert (told.group_ranks, told.source_rank, told.sequence) == ("", ABSENT, 3)
    assert set(odd(trace)) == {"In msg nelems", "Group size", "Process Group Ranks", "Src Rank"}


def test_a_long_list_of_ranks_is_cut_by_the_profiler_and_stays(write_trace: Write) -> None:
    args = {"Collective name": "allreduce", "Process Group Ranks": "[0, 1, ..., 6, 7]"}
    trace = read(write_trace, op("record_param_comms", 0, 9, **args))
    assert trace.collectives[0].group_ranks == "[0, 1, ..., 6, 7]"
    assert odd(trace) == {}


@pytest.mark.parametrize("ranks", [[0, 0], [-1], [2**30], ["0"], [True], "0", None, {}])
def test_ranks_that_no_group_has(ranks: Any) -> None:
    assert rank_list(ranks) is None


def test_facts_about_the_file_are_checked_too(write_trace: Write) -> None:
    group = {"pg_name": 0, "pg_desc": "default_pg", "pg_size": HUGE, "ranks": [0, "1"]}
    trace = read(
        write_trace,
        op("a", 0, 9),
        distributedInfo={"rank": -3, "world_size": HUGE, "backend": 7, "pg_config": [group, 5]},
        deviceProperties=[{"id": 0, "name": ["x"], "totalGlobalMem": HUGE, "numSms": -1}],
    )
    assert (trace.rank, trace.world_size, trace.backend) == (None, None, None)
    assert trace.groups == ({"pg_desc": "default_pg"},)
    assert (trace.devices[0].memory_bytes, trace.devices[0].name) == (ABSENT, "")
    assert set(odd(trace)) == {
        "rank", "world_size", "pg_name", "pg_size", "ranks", "totalGlobalMem",
    }  # fmt: skip


def test_odd_values_are_reported_in_the_explanation(write_trace: Write) -> None:
    path = write_trace([op("aten::mm", 0, 5, **{"Input Dims": [[HUGE]]}), op("a", 9, 1)])
    (rank,) = explain(path, cache=False).ranks
    assert "odd-values" in {note.id for note in rank.quality}
