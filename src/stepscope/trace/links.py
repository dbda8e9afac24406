"""Which event belongs to which: parent, launch, forward of backward. Columns in, columns out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.trace import ABSENT, Columns, Flags, HostEvents, HostKind, Int32, Int64

# Among events of equal extent the outer one comes first.
_NESTING = np.array([2, 1, 0, 3, 4, 5], dtype=np.int8)
_MAX_ROUNDS = 512


def host_order(columns: Columns) -> NDArray[np.intp]:
    """The order of records/trace.py: by thread, start, longest first, outer kind first."""
    thread, start = columns["thread"], columns["start_ns"]
    order = np.lexsort((start, thread))  # nearly the file's own order; ties are sorted below
    tied = np.zeros(len(order) + 1, np.bool_)
    tied[1:-1] = (np.diff(start[order]) == 0) & (np.diff(thread[order]) == 0)
    places = np.flatnonzero(tied[1:] | tied[:-1])
    rows = order[places]
    keys = (_NESTING[columns["kind"][rows]], -columns["dur_ns"][rows], start[rows], thread[rows])
    order[places] = rows[np.lexsort(keys)]
    return order


def are_sorted(*keys: NDArray[Any]) -> bool:
    """Whether the rows ascend by the first key, equal ones by the next, and so on."""
    tied = np.ones(max(0, len(keys[0]) - 1), np.bool_)
    for key in keys:
        later, earlier = key[1:], key[:-1]
        if (tied & (later < earlier)).any():
            return False
        tied &= later == earlier
    return True


def find_parents(thread: Int32, start: Int64, end: Int64) -> Int32:
    """Find the nearest earlier row that encloses each row in host order, or -1.

    It is the nearest earlier row that does not end before this one. Every row first guesses its
    predecessor; a wrong guess is replaced by that row's own guess, which skips only rows that end
    even earlier. Across siblings the reach doubles each round; out of a nest it grows by one level.
    Nests deeper than any program's are walked row by row.
    """
    count = len(start)
    guess = np.arange(-1, count - 1)
    if count:
        guess[np.flatnonzero(np.diff(thread, prepend=thread[:1] - 1))] = ABSENT
    active = np.flatnonzero(guess >= 0)
    for _ in range(_MAX_ROUNDS):
        above = guess[active]
        wrong = end[above] < end[active]
        active, above = active[wrong], above[wrong]
        guess[active] = guess[above]
        active = active[guess[active] >= 0]
        if not len(active):
            return guess.astype(np.int32)
    return _walk_parents(thread, end)


def _walk_parents(thread: Int32, end: Int64) -> Int32:
    """Find parents with a stack of open rows: linear, however deep the nesting."""
    parent: list[int] = []
    open_rows: list[int] = []
    ends, threads = end.tolist(), thread.tolist()
    for row, row_end in enumerate(ends):
        if open_rows and threads[open_rows[-1]] != threads[row]:
            open_rows.clear()
        while open_rows and ends[open_rows[-1]] < row_end:
            open_rows.pop()
        parent.append(open_rows[-1] if open_rows else ABSENT)
        open_rows.append(row)
    return np.array(parent, dtype=np.int32)


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """Each value once, sorted. np.unique does the same, but imports numpy.ma first: 14 ms."""
    ordered = np.sort(values)
    return ordered[np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))]


def is_among(values: NDArray[Any], wanted: NDArray[Any]) -> Flags:
    """np.isin for large numbers, without numpy.ma."""
    if not len(wanted):
        return np.zeros(len(values), np.bool_)
    ordered = np.sort(wanted)
    place = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    found: Flags = ordered[place] == values
    return found


def nearest(host: HostEvents, wanted: Flags) -> Int32:
    """Find for every host row itself or its nearest ancestor among the wanted rows, or -1."""
    if not wanted.any():
        return np.full(len(host), ABSENT, np.int32)
    ancestor = np.where(wanted, np.arange(len(host)), host.parent)
    active = np.flatnonzero((ancestor >= 0) & ~wanted[ancestor])
    while len(active):
        above = ancestor[active] = ancestor[ancestor[active]]
        active = active[(above >= 0) & ~wanted[above]]
    return ancestor.astype(np.int32)


def nearest_of(host: HostEvents, wanted: Flags, rows: NDArray[Any]) -> Int32:
    """`nearest` for a few rows (-1 stays -1): climbs from them, one level at a time."""
    if not wanted.any():
        return np.full(len(rows), ABSENT, np.int32)
    ancestor = rows.astype(np.intp)  # numpy indexes with these three times as fast as with int32
    active = np.flatnonzero(ancestor >= 0)
    here = ancestor[active]
    while len(active):
        unwanted = ~wanted[here]
        active = active[unwanted]
        here = host.parent[here[unwanted]].astype(np.intp)
        ancestor[active] = here
        has_parent = here >= 0
        active, here = active[has_parent], here[has_parent]
    return ancestor.astype(np.int32)


def count_ancestors(parent: Int32) -> Int32:
    """The number of ancestors of each row. The reach of `above` doubles each round."""
    depth = (parent >= 0).astype(np.int32)  # levels from a row up to `above`
    above = parent.astype(np.intp)
    active = np.flatnonzero(above >= 0)
    while len(active):
        here = above[active]
        depth[active] += depth[here]
        above[active] = here = above[here]
        active = active[here >= 0]
    return depth


def find_launches(host: Columns, device_correlation: Int64) -> Int32:
    """The runtime call with the same correlation; the earliest one if ids repeat."""
    rows = np.flatnonzero((host["kind"] == HostKind.RUNTIME) & (host["correlation"] > 0))
    if not len(rows):
        return np.full(len(device_correlation), ABSENT, dtype=np.int32)
    by_id = np.lexsort((host["start_ns"][rows], host["correlation"][rows]))
    rows = rows[by_id]
    ids = host["correlation"][rows]
    place = np.minimum(np.searchsorted(ids, device_correlation), len(ids) - 1)
    linked = (ids[place] == device_correlation) & (device_correlation > 0)
    return np.where(linked, rows[place], ABSENT).astype(np.int32)


def locate(
    lane: Int32, start: Int64, rows: NDArray[np.intp], at_lane: Int32, at_time: Int64
) -> Int64:
    """The first of `rows` that starts on that lane at exactly that time, or -1."""
    if not len(rows) or not len(at_time):
        return np.full(len(at_time), ABSENT, dtype=np.int64)
    lanes = np.concatenate((lane[rows], at_lane)).astype(np.int64)
    times = np.concatenate((start[rows], at_time))
    times -= times.min()
    span = int(times.max()) + 1
    if int(lanes.max()) >= 2**62 // span:  # use the order of the times instead
        times, span = np.unique(times, return_inverse=True)[1], len(times)
    keys = lanes * span + times  # one number for each (lane, time)
    row_keys, wanted_keys = keys[: len(rows)], keys[len(rows) :]
    order = np.argsort(row_keys, kind="stable")
    place = np.minimum(np.searchsorted(row_keys[order], wanted_keys), len(rows) - 1)
    candidate = order[place]
    return np.where(row_keys[candidate] == wanted_keys, rows[candidate], ABSENT)


def launches_by_flow(host: Columns, device: Columns, flows: Columns) -> Int32:
    """Launches of device events without a correlation, from the flow events that end at them."""
    launch = np.full(len(device["start_ns"]), ABSENT, dtype=np.int32)
    begins, ends = _pairs(flows)
    if not len(begins):
        return launch
    calls = np.flatnonzero(host["kind"] == HostKind.RUNTIME)
    source = locate(
        host["thread"], host["start_ns"], calls, flows["lane"][begins], flows["time_ns"][begins]
    )
    all_rows = np.arange(len(launch))
    target = locate(
        device["lane"], device["start_ns"], all_rows, flows["lane"][ends], flows["time_ns"][ends]
    )
    good = (source >= 0) & (target >= 0)
    launch[target[good]] = source[good]
    return launch


def find_forwards(host: Columns, flows: Columns) -> Int32:
    """A backward operator's forward operator: by flow event, else by sequence number."""
    count = len(host["start_ns"])
    forward_of = np.full(count, ABSENT, dtype=np.int32)
    numbered = (host["kind"] == HostKind.OPERATOR) & (host["sequence"] >= 0)
    forwards = np.flatnonzero(numbered & (host["forward_thread"] <= 0))
    backwards = np.flatnonzero(numbered & (host["forward_thread"] > 0))
    _link_by_sequence(host, forwards, backwards, forward_of)
    begins, ends = _pairs(flows)
    if len(begins):
        rows = np.flatnonzero(host["kind"] == HostKind.OPERATOR)
        where = (host["thread"], host["start_ns"], rows)
        source = locate(*where, flows["lane"][begins], flows["time_ns"][begins])
        target = locate(*where, flows["lane"][ends], flows["time_ns"][ends])
        good = (source >= 0) & (target >= 0) & (source != target)
        forward_of[target[good]] = source[good]
    return forward_of


def _link_by_sequence(
    host: Columns, forwards: NDArray[np.intp], backwards: NDArray[np.intp], out: Int32
) -> None:
    """If nested forward operators share a number, the last to start made the autograd node."""
    if not len(forwards) or not len(backwards):
        return
    sequence, start = host["sequence"], host["start_ns"]
    forwards = forwards[np.lexsort((start[forwards], sequence[forwards]))]
    place = np.searchsorted(sequence[forwards], sequence[backwards], side="right") - 1
    candidate = forwards[np.maximum(place, 0)]
    good = (place >= 0) & (sequence[candidate] == sequence[backwards])
    good &= start[candidate] <= start[backwards]
    out[backwards[good]] = candidate[good]


def _pairs(flows: Columns) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows of flow begins and ends with the same id (one begin may have several ends)."""
    known = flows["id"] != ABSENT
    begins = np.flatnonzero(flows["begins"] & known)
    ends = np.flatnonzero(~flows["begins"].astype(bool) & known)
    if not len(begins) or not len(ends):
        return begins[:0], ends[:0]
    begins = begins[np.argsort(flows["id"][begins], kind="stable")]
    ids = flows["id"][begins]
    place = np.minimum(np.searchsorted(ids, flows["id"][ends]), len(ids) - 1)
    hit = ids[place] == flows["id"][ends]
    return begins[place[hit]], ends[hit]
