"""What the page decodes is what the trace held."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.ui.html.pane import encode_rank, transpose
from stepscope.ui.html.picture import draw_rank


@pytest.fixture
def picture(make_trace, explain):
    trace = make_trace(steps=3, layers=7)
    return draw_rank(trace, explain(trace))


def starts(columns, unzigzag):
    delta = unzigzag(columns["start_delta"])
    edges = columns["row_start"].tolist()
    rows = [np.cumsum(delta[a:b]) for a, b in pairwise(edges)]
    return np.concatenate(rows)


def test_events_survive_the_round_trip(picture, decode, unzigzag):
    head, columns = decode(encode_rank(picture, []))
    events = picture.events
    assert head["picture"]["strings"] == list(picture.strings)
    assert (starts(columns, unzigzag) == events.start_ns).all()
    assert (columns["dur"] == events.dur_ns).all()
    assert (columns["name"] == events.name).all()
    assert (columns["kind"] == events.kind).all()
    assert (np.cumsum(unzigzag(columns["link"])) - 1 == events.link).all()


def test_events_that_began_before_the_window_keep_their_start(
    make_trace, explain, decode, unzigzag
):
    trace = make_trace(steps=8, layers=6)
    start = trace.host.start_ns.copy()
    dur = trace.host.dur_ns.copy()
    start[0], dur[0] = start[0] - 50_000, dur[0] * 20
    trace = replace(trace, host=replace(trace.host, start_ns=start, dur_ns=dur))
    rank = explain(make_trace(steps=8, layers=6))
    picture = draw_rank(trace, rank, max_events=len(trace.host) // 2)
    _, columns = decode(encode_rank(picture, []))
    assert picture.events.start_ns.min() < 0
    assert (starts(columns, unzigzag) == picture.events.start_ns).all()


def test_gaps_and_flames_survive_the_round_trip(picture, decode):
    _, columns = decode(encode_rank(picture, []))
    assert (columns["gap_start"] == picture.gaps.start_ns).all()
    assert (columns["gap_dur"] == picture.gaps.dur_ns).all()
    assert (columns["gap_frame"] == picture.gaps.frame + 1).all()
    for name, flame in (("host", picture.host_flame), ("device", picture.device_flame)):
        assert (columns[f"{name}_parent"] == flame.parent + 1).all()
        assert (columns[f"{name}_total"] == flame.total_ns).all()
        assert (columns[f"{name}_self"] == flame.self_ns).all()
        assert (columns[f"{name}_count"] == flame.count).all()


def test_a_column_is_only_as_wide_as_its_largest_value():
    assert transpose(np.array([1, 2, 255])) == bytes([1, 2, 255])
    assert transpose(np.array([1, 256])) == bytes([1, 0, 0, 1])
    assert transpose(np.array([0, 0])) == b""


def test_a_rank_without_a_picture_keeps_its_tables(decode):
    head, columns = decode(encode_rank(None, [{"title": "Kernels"}]))
    assert head == {"tables": [{"title": "Kernels"}], "columns": []}
    assert columns == {}
