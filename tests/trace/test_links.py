"""Which event belongs to which, against slow and obvious answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.records.trace import HostKind
from stepscope.trace import links

SPANS = st.lists(
    st.tuples(
        st.integers(0, 2),  # thread
        st.integers(0, 30),  # start
        st.integers(0, 30),  # duration
        st.integers(0, 5),  # kind
    ),
    max_size=40,
)


def in_host_order(spans: list[tuple[int, int, int, int]]) -> dict[str, np.ndarray[Any, Any]]:
    thread, start, dur, kind = (
        np.array([span[i] for span in spans], dtype=dtype)
        for i, dtype in enumerate((np.int32, np.int64, np.int64, np.int8))
    )
    columns = {"thread": thread, "start_ns": start, "dur_ns": dur, "kind": kind}
    order = links.host_order(columns)
    return {name: values[order] for name, values in columns.items()}


def enclosing(host: dict[str, np.ndarray[Any, Any]], row: int) -> int:
    """The nearest row before that contains this one, by trying them all."""
    start, end = host["start_ns"], host["start_ns"] + host["dur_ns"]
    for other in range(row - 1, -1, -1):
        same = host["thread"][other] == host["thread"][row]
        if same and start[other] <= start[row] and end[other] >= end[row]:
            return other
    return -1


def parents_of(host: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return links.find_parents(host["thread"], host["start_ns"], host["start_ns"] + host["dur_ns"])


@given(SPANS)
@settings(max_examples=400)
def test_parents_are_the_nearest_enclosing_rows(spans: list[tuple[int, int, int, int]]) -> None:
    host = in_host_order(spans)
    assert parents_of(host).tolist() == [enclosing(host, row) for row in range(len(spans))]


@given(SPANS)
def test_walking_row_by_row_gives_the_same_parents(spans: list[tuple[int, int, int, int]]) -> None:
    host = in_host_order(spans)
    end = host["start_ns"] + host["dur_ns"]
    assert links._walk_parents(host["thread"], end).tolist() == parents_of(host).tolist()


def test_the_outer_kind_is_the_parent_of_an_event_of_equal_extent() -> None:
    kinds = [HostKind.RUNTIME, HostKind.OPERATOR, HostKind.PYTHON, HostKind.ANNOTATION]
    host = in_host_order([(0, 5, 5, kind) for kind in kinds])
    assert host["kind"].tolist() == [
        HostKind.PYTHON,
        HostKind.ANNOTATION,
        HostKind.OPERATOR,
        HostKind.RUNTIME,
    ]
    assert parents_of(host).tolist() == [-1, 0, 1, 2]


def test_very_deep_nesting_takes_no_longer() -> None:
    depth = 30_000
    nest = [(0, i, 4 * depth - 2 * i, 0) for i in range(depth)]
    stairs = [(0, 2 * depth + i, 4 * depth, 0) for i in range(depth)]
    host = in_host_order([*nest, *stairs])
    parent = parents_of(host)
    assert parent[:depth].tolist() == list(range(-1, depth - 1))
    assert (parent[depth:] == -1).all()
    assert links.count_ancestors(parent)[: depth + 1].tolist() == [*range(depth), 0]


@given(SPANS)
def test_depth_counts_ancestors(spans: list[tuple[int, int, int, int]]) -> None:
    parent = parents_of(in_host_order(spans))
    expected = []
    for row in range(len(parent)):
        depth, above = 0, parent[row]
        while above >= 0:
            depth, above = depth + 1, parent[above]
        expected.append(depth)
    assert links.count_ancestors(parent).tolist() == expected


@given(SPANS, st.lists(st.booleans(), min_size=40, max_size=40))
def test_nearest_is_the_row_itself_or_its_first_wanted_ancestor(
    spans: list[tuple[int, int, int, int]], flags: list[bool]
) -> None:
    class Host:
        def __init__(self) -> None:
            self.parent = parents_of(in_host_order(spans))

        def __len__(self) -> int:
            return len(self.parent)

    host, wanted = Host(), np.array(flags[: len(spans)], dtype=bool)
    expected = []
    for row in range(len(host)):
        while row >= 0 and not wanted[row]:
            row = int(host.parent[row])
        expected.append(row)
    assert links.nearest(host, wanted).tolist() == expected  # type: ignore[arg-type]


def calls(*rows: tuple[int, int]) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "kind": np.full(len(rows), HostKind.RUNTIME, np.int8),
        "correlation": np.array([c for c, _ in rows], np.int64),
        "start_ns": np.array([s for _, s in rows], np.int64),
    }


@given(
    st.lists(st.tuples(st.integers(-1, 6), st.integers(0, 50)), max_size=20),
    st.lists(st.integers(-1, 8), max_size=20),
)
def test_launch_is_the_earliest_call_of_that_correlation(
    rows: list[tuple[int, int]], asked: list[int]
) -> None:
    host = calls(*rows)
    found = links.find_launches(host, np.array(asked, np.int64)).tolist()
    for correlation, launch in zip(asked, found, strict=True):
        same = [start for c, start in rows if c == correlation and c > 0]
        if not same:
            assert launch == -1
        else:
            assert rows[launch] == (correlation, min(same))


def test_only_runtime_calls_launch() -> None:
    host = calls((5, 1), (5, 2))
    host["kind"][0] = HostKind.OPERATOR
    assert links.find_launches(host, np.array([5, 0, -1])).tolist() == [1, -1, -1]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=30),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10)), max_size=30),
    st.sampled_from([1, 2**57]),
)
def test_locate_finds_the_first_row_of_that_lane_and_time(
    rows: list[tuple[int, int]], asked: list[tuple[int, int]], scale: int
) -> None:
    rows = [(lane, time * scale) for lane, time in rows]
    asked = [(lane, time * scale) for lane, time in asked]
    lane = np.array([lane for lane, _ in rows], np.int32)
    start = np.array([time for _, time in rows], np.int64)
    chosen = np.arange(len(rows))[::2]
    found = links.locate(
        lane,
        start,
        chosen,
        np.array([lane for lane, _ in asked], np.int32),
        np.array([time for _, time in asked], np.int64),
    )
    known = {}
    for row in chosen.tolist():
        known.setdefault(rows[row], row)
    assert found.tolist() == [known.get(key, -1) for key in asked]


def operators(*rows: tuple[int, int, int, int]) -> dict[str, np.ndarray[Any, Any]]:
    """(thread, start, sequence, forward thread) of operators."""
    return {
        "kind": np.zeros(len(rows), np.int8),
        "thread": np.array([r[0] for r in rows], np.int32),
        "start_ns": np.array([r[1] for r in rows], np.int64),
        "sequence": np.array([r[2] for r in rows], np.int64),
        "forward_thread": np.array([r[3] for r in rows], np.int32),
    }


def flows(*rows: tuple[bool, int, int, int]) -> dict[str, np.ndarray[Any, Any]]:
    """(begins, id, lane, time)."""
    return {
        "begins": np.array([r[0] for r in rows], bool),
        "id": np.array([r[1] for r in rows], np.int64),
        "lane": np.array([r[2] for r in rows], np.int32),
        "time_ns": np.array([r[3] for r in rows], np.int64),
    }


def test_backward_finds_its_forward_by_sequence_number() -> None:
    host = operators((0, 0, 7, 0), (0, 1, 7, 0), (0, 5, 8, 0), (1, 9, 7, 1), (1, 10, 9, 1))
    assert links.find_forwards(host, flows()).tolist() == [-1, -1, -1, 1, -1]


def test_a_flow_event_outranks_the_sequence_number() -> None:
    host = operators((0, 0, 7, 0), (0, 5, 8, 0), (1, 9, 7, 1))
    drawn = flows((True, 3, 0, 5), (False, 3, 1, 9))
    assert links.find_forwards(host, drawn).tolist() == [-1, -1, 1]


def test_flow_events_without_a_start_an_end_or_an_id_link_nothing() -> None:
    host = operators((0, 0, -1, 0), (1, 9, -1, 0))
    for drawn in (
        flows((False, 3, 1, 9)),
        flows((True, 3, 0, 0)),
        flows((True, 3, 0, 0), (False, 4, 1, 9)),
        flows((True, -1, 0, 0), (False, -1, 1, 9)),
        flows((True, 3, 0, 1), (False, 3, 1, 9)),
    ):
        assert links.find_forwards(host, drawn).tolist() == [-1, -1]


@pytest.mark.parametrize("count", [50_000])
def test_events_on_thousands_of_lanes_are_located_quickly(count: int) -> None:
    lane, time = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int64)
    found = links.locate(lane, time, np.arange(count), lane[::-1], time[::-1])
    assert (found == np.arange(count)[::-1]).all()


@given(
    st.lists(st.integers(-(2**62), 2**62) | st.integers(0, 5), max_size=20),
    st.lists(st.integers(-(2**62), 2**62) | st.integers(0, 5), max_size=20),
)
def test_is_among_is_isin(values: list[int], wanted: list[int]) -> None:
    given_values, given_wanted = np.array(values, np.int64), np.array(wanted, np.int64)
    assert links.is_among(given_values, given_wanted).tolist() == [one in wanted for one in values]
