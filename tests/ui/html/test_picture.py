"""The picture holds the trace's events, each once, in its lane and row."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.ui.html.lanes import overlap_rows, stack_depth, thread_names
from stepscope.ui.html.picture import ANY_STEP, UNLINKED, draw_rank
from stepscope.ui.html.render import EVENT_CLASSES


@pytest.fixture
def trace(make_trace):
    return make_trace(steps=3, layers=5)


@pytest.fixture
def picture(trace, explain):
    return draw_rank(trace, explain(trace))


def named(picture, column):
    return [picture.strings[code] for code in column.tolist()]


def first_start(trace):
    return min(trace.host.start_ns.min(), trace.device.start_ns.min())


def test_every_event_is_drawn_once_with_its_time_and_name(trace, picture):
    def rows(start, dur, names):
        return sorted(zip(start.tolist(), dur.tolist(), names, strict=True))

    events, zero = picture.events, first_start(trace)
    drawn = rows(events.start_ns + zero, events.dur_ns, named(picture, events.name))
    host = rows(trace.host.start_ns, trace.host.dur_ns, [trace.strings[c] for c in trace.host.name])
    device = rows(
        trace.device.start_ns, trace.device.dur_ns, [trace.strings[c] for c in trace.device.name]
    )
    assert drawn == sorted(host + device)
    assert picture.left_out == ""


def test_rows_are_sorted_and_host_rows_never_overlap(picture):
    events = picture.events
    for lane in picture.lanes:
        for row in range(lane.first_row, lane.first_row + lane.rows):
            inside = slice(events.row_start[row], events.row_start[row + 1])
            start, end = events.start_ns[inside], events.start_ns[inside] + events.dur_ns[inside]
            assert (np.diff(start) >= 0).all()
            assert (start[1:] >= end[:-1]).all()


def test_lanes_put_the_device_first_and_name_main_and_backward(picture):
    assert [lane.group for lane in picture.lanes] == ["device", "device", "host", "host"]
    assert picture.lanes[0].name == "Stream 7"
    assert picture.lanes[2].name == "Main · python"
    assert picture.lanes[3].name == "Backward · thread 11"
    assert sum(lane.events for lane in picture.lanes) == len(picture.events)


def test_links_point_from_device_events_to_their_launches(trace, picture):
    events = picture.events
    linked = np.flatnonzero(events.link >= 0)
    assert len(linked) == (trace.device.launch >= 0).sum()
    assert set(named(picture, events.name[events.link[linked]])) == {"cudaLaunchKernel"}
    expected = sorted(
        (int(start), int(trace.host.start_ns[launch]))
        for start, launch in zip(trace.device.start_ns, trace.device.launch, strict=True)
    )
    zero = first_start(trace)
    seen = sorted(
        (int(events.start_ns[i]) + zero, int(events.start_ns[j]) + zero)
        for i, j in zip(linked, events.link[linked], strict=True)
    )
    assert seen == expected


def test_kernels_take_the_kind_that_explain_gave_them(picture):
    events = picture.events
    kinds = {
        name: EVENT_CLASSES[kind]
        for name, kind in zip(named(picture, events.name), events.kind.tolist(), strict=True)
    }
    assert kinds["ncclDevKernel_AllReduce_Sum_f32_RING_LL"] == "comm"
    assert kinds["Memcpy HtoD (Pageable -> Device)"] == "memory"
    assert kinds["void at::native::gemm_0<float, 128>()"] == "compute"
    assert kinds["aten::addmm"] == "operator"


def test_strings_hold_only_names_in_use(trace, explain):
    picture = draw_rank(replace(trace, strings=(*trace.strings, "unused")), explain(trace))
    assert "unused" not in picture.strings
    assert len(set(picture.strings)) == len(picture.strings)


def test_gaps_keep_their_time_and_the_function_the_host_was_in(trace, explain):
    rank = explain(trace)
    frame = rank.gaps.frame.copy()
    frame[0] = int(np.flatnonzero(trace.host.kind == 2)[0])
    picture = draw_rank(trace, replace(rank, gaps=replace(rank.gaps, frame=frame)))
    assert (picture.gaps.start_ns + first_start(trace) == rank.gaps.start_ns).all()
    assert (picture.gaps.dur_ns == rank.gaps.end_ns - rank.gaps.start_ns).all()
    assert picture.strings[picture.gaps.frame[0]] == "/home/me/train.py(42): forward"
    assert (picture.gaps.frame[1:] == -1).all()


def test_a_picture_travels_between_processes(picture):
    again = pickle.loads(pickle.dumps(picture))
    assert (again.events.start_ns == picture.events.start_ns).all()
    assert again.strings == picture.strings


def test_an_empty_trace_has_an_empty_picture(empty_trace, explain):
    picture = draw_rank(empty_trace, explain(empty_trace))
    assert len(picture.events) == len(picture.host_flame) == len(picture.device_flame) == 0
    assert picture.lanes == ()


def test_too_many_events_keep_whole_steps_and_say_so(make_trace, explain):
    trace = make_trace(steps=10, layers=20)
    total = len(trace.host) + len(trace.device)
    picture = draw_rank(trace, explain(trace), max_events=total // 2)
    assert 0.3 * total < len(picture.events) <= total // 2
    assert [step.name for step in picture.steps][-1] == "ProfilerStep#13"
    assert f"of {total:,} events" in picture.left_out
    assert "of 10 steps" in picture.left_out


def test_without_steps_the_longest_events_of_every_lane_stay(make_trace, explain):
    trace = make_trace(steps=6, layers=20)
    rank = explain(trace)
    rank = replace(rank, steps=replace(rank.steps, steps=()))
    total = len(trace.host) + len(trace.device)
    picture = draw_rank(trace, rank, max_events=200)
    assert 150 < len(picture.events) <= 200
    assert {lane.group for lane in picture.lanes} == {"device", "host"}
    assert f"longest {len(picture.events)} of {total:,}" in picture.left_out
    everything = draw_rank(trace, rank)
    assert (everything.host_flame.total_ns == picture.host_flame.total_ns).all()


def test_depth_counts_enclosing_events():
    parent = np.array([-1, 0, 1, 1, 0, -1, 5], dtype=np.int32)
    assert stack_depth(parent).tolist() == [0, 1, 2, 2, 1, 0, 1]


def test_overlapping_events_of_a_stream_get_rows_of_their_own():
    start = np.array([0, 5, 6, 10, 12])
    end = np.array([10, 8, 9, 12, 14])
    rows = overlap_rows(start, end)
    assert rows.tolist() == [0, 1, 2, 0, 0]


def test_steps_merge_under_one_name_in_the_flame(picture):
    names = named(picture, picture.host_flame.name)
    assert names.count(ANY_STEP) == 1
    assert not any(name.startswith("ProfilerStep#") for name in set(names) - {ANY_STEP})
    assert UNLINKED not in named(picture, picture.device_flame.name)


def test_a_threads_number_has_no_sign(make_trace):
    trace = make_trace()
    threads = (trace.threads[0], replace(trace.threads[1], tid="-549452224"))
    names = thread_names(replace(trace, threads=threads))
    assert names[1] == "Backward · thread 3745515072"
