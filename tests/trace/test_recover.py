"""Damaged events: all the others are kept, and what was lost or repaired is counted and placed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kineto_events import kernel, op, ops

from layouts import text_of
from stepscope import read_trace
from stepscope.records.quality import Note
from stepscope.records.trace import HostKind, Trace
from stepscope.trace import files

SIZES = [200, 1000, 1 << 20]


def notes(trace: Trace) -> dict[str, Note]:
    return {note.id: note for note in trace.quality}


def names(trace: Trace) -> list[str]:
    return [trace.strings[code] for code in trace.host.name]


@pytest.fixture(params=SIZES, ids=lambda size: f"pieces of {size}")
def read(request: pytest.FixtureRequest, write_trace: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Read events with raw text among them, in small and in large pieces."""
    monkeypatch.setattr(files, "PIECE_BYTES", request.param)

    def write_and_read(events: list[Any] | bytes, layout: str = "kineto", **options: Any) -> Trace:
        return read_trace(write_trace(events, layout, **options), cache=False)

    return write_and_read


def raw(name_text: str, ts: int = 55) -> str:
    """An event whose name is put between the quotes as it stands."""
    return (
        f'{{"ph": "X", "cat": "cpu_op", "name": "{name_text}", "pid": 1, "tid": 1, '
        f'"ts": {ts}, "dur": 1, "args": {{"Sequence number": 7}}}}'
    )


REPAIRABLE = {
    "unescaped quotes": ('say "hi"', 'say "hi"'),
    "a quoted list": ('f("a", "b")', 'f("a", "b")'),
    "quotes that look like keys": ('{"name": "x"}', '{"name": "x"}'),
    "a stray backslash": (r"C:\work\x", r"C:\work\x"),
    "an escaped backslash beside a stray one": (r"C:\\dir \work", r"C:\dir \work"),
    "an unfinished unicode escape": (r"\u12", r"\u12"),
    "a lone surrogate": (r"a\ud800b", "a\ufffdb"),
    "a raw newline": ("two\nlines", "two\nlines"),
    "a raw tab and a bell": ("a\tb\x07", "a\tb\x07"),
    "broken UTF-8": ("caf\udce9", "caf\ufffd"),
    "a truncated UTF-8 sequence": ("\udce2\udc98", "\ufffd"),
}


@pytest.mark.parametrize(("written", "meant"), REPAIRABLE.values(), ids=REPAIRABLE)
def test_slips_in_a_name_are_repaired_and_lose_no_event(
    read: Any, written: str, meant: str
) -> None:
    trace = read([*ops(5), raw(written), *ops(5)])
    assert trace.events == 11
    assert meant in names(trace)
    assert notes(trace)["mended"].count == 1
    assert "unreadable-events" not in notes(trace)


@pytest.mark.parametrize("bare", ["nan", "NaN", "-nan", "inf", "-inf", "Infinity", "-nan(ind)"])
def test_bare_nan_and_inf_in_arguments_lose_no_event(read: Any, bare: str) -> None:
    event = raw("a").replace(
        '"Sequence number": 7', f'"Sequence number": 7, "loss": {bare}, "l": [{bare}]'
    )
    trace = read([*ops(5), event, *ops(5)])
    assert trace.events == 11
    assert len(trace.host) == 11
    assert 7 in trace.host.sequence
    assert notes(trace)["mended"].count == 1


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "9" * 5000, "null", '"soon"'])
def test_an_event_whose_start_is_not_a_number_is_left_out(read: Any, number: str) -> None:
    trace = read([*ops(5), raw("a").replace("55", number), *ops(5)])
    assert trace.events == 11
    assert len(trace.host) == 10
    assert notes(trace)["malformed"].count == 1
    assert "without a usable start" in notes(trace)["malformed"].detail


def test_repairing_one_event_leaves_the_names_of_its_neighbours_alone(read: Any) -> None:
    name = r'grid [nan, inf] C:\new: nan, x", "ph": "Y", \"'
    odd = op(name, 1, 1) | {"ts": 3}
    odd = {"name": name, "sf": 1, "cat": "cpu_op", "tdur": 1, **odd}
    for bad in (raw("bad \\ slash"), raw('bad "quotes"')):
        trace = read([op(name, 1, 1), bad, odd, op(name, 2, 1)], "minified")
        assert names(trace).count(name) == 3
        assert notes(trace)["mended"].count == 1


def test_events_that_cannot_be_repaired_are_counted_with_the_place_of_the_first(read: Any) -> None:
    events: list[Any] = ops(30)
    events[10] = '{"ph": "X", "cat" oops}'
    events[20] = '{"ph": "X", "name": "no end, "ts": 3}'
    text = text_of(events)
    trace = read(events)
    assert trace.events == 28
    note = notes(trace)["unreadable-events"]
    assert note.count == 2
    assert note.byte_offset == text.index(b'{"ph": "X", "cat" oops}')
    assert str(note.byte_offset) in note.detail


@pytest.mark.parametrize("bracket", ["{", "}", "[", "]", '"', ","])
@pytest.mark.parametrize("layout", ["kineto", "minified", "bare_list"])
def test_a_missing_bracket_quote_or_comma_loses_at_most_that_event(
    read: Any, bracket: str, layout: str
) -> None:
    whole = json.dumps(op("aten::mm", 55, 1, **{"Input Dims": [[1, 2], [3]]}))
    for at in [i for i, c in enumerate(whole) if c == bracket][1:]:
        trace = read([*ops(6), whole[:at] + whole[at + 1 :], *ops(6)], layout)
        lost = notes(trace).get("unreadable-events")
        assert trace.events + (lost.count if lost and lost.count else 0) == 13, whole[:at]
        assert len(trace.quality) == 1


def test_commas_too_many_or_too_few_lose_nothing_and_are_reported(read: Any) -> None:
    for old, new in ((b"},\n  {", b"}\n  {"), (b"},\n  {", b"},,\n {"), (b"}\n  ]", b"},\n  ]")):
        text = text_of(ops(12))
        assert old in text
        at = text.rindex(old)
        trace = read(text[:at] + new + text[at + len(old) :])
        assert trace.events == 12
        assert trace.rank == 3


WRONG = [None, True, 5, -1.5, "text", [], [1], {}, {"a": 1}, 10**30, "", "1e400"]


@pytest.mark.parametrize("key", ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id"])
def test_wrong_types_anywhere_keep_every_event_and_all_neighbours(read: Any, key: str) -> None:
    events = ops(10)
    for value in WRONG:
        events += [op("odd", 55, 1) | {key: value}, op("next", 60, 1)]
    trace = read(events)
    assert trace.events == len(events)
    assert names(trace).count("next") == len(WRONG)
    assert sum(name.startswith("aten::") for name in names(trace)) == 10
    assert "unreadable-events" not in notes(trace)


def test_odd_types_are_reported_once_for_each_event(read: Any) -> None:
    trace = read([*ops(5), op("a", "60.5", 1), op("b", 70, "2"), op("c", 80, 1) | {"args": [1]}])
    assert notes(trace)["odd-types"].count == 3
    assert len(trace.host) == 8
    start = dict(zip(names(trace), trace.host.start_ns.tolist(), strict=True))
    assert start["a"] == 60_500
    assert trace.host.dur_ns[names(trace).index("b")] == 2000


def test_odd_types_next_to_times_that_need_their_text_keep_the_nanosecond(read: Any) -> None:
    events = [
        op("exact", 1, 1) | {"ts": "@"},
        op("quoted", 1, 1) | {"ts": "1700000000123456.791"},
        op("odd", 1, 1) | {"ts": "@", "name": None},
    ]
    rows = [json.dumps(e).replace('"@"', "1700000000123456.789") for e in events]
    trace = read(rows, head={}, tail={})
    assert sorted(trace.host.start_ns.tolist()) == [
        1_700_000_000_123_456_789,
        1_700_000_000_123_456_789,
        1_700_000_000_123_456_791,
    ]


def test_numbers_in_quotes_and_floats_for_ids_join_their_thread(read: Any) -> None:
    trace = read([op("a", 0, 9, tid=4), op("b", 1, 2, tid=4.0), op("c", 2, 1, tid=4)])
    assert len(trace.threads) == 1
    assert trace.host.parent.tolist() == [-1, 0, 1]


def test_numbers_that_nothing_can_hold_are_absent_arguments(read: Any) -> None:
    events = [raw("a").replace('"Sequence number": 7', f'"Sequence number": 7, {odd}') for odd in (
        '"Fwd thread id": 1e999, "Input Dims": [1e999]', '"Fwd thread id": -1e4000, "grid": [1]',
    )]  # fmt: skip
    trace = read([*ops(3), *events])
    assert trace.events == 5
    assert (trace.host.sequence == 7).sum() == 2
    assert trace.host.forward_thread.max() == -1
    assert notes(trace)["odd-types"].count == 2


def test_elements_that_are_not_objects_are_counted_separately(read: Any) -> None:
    trace = read([*ops(3), "5", '"text"', "[1, 2]", "null", *ops(3)])
    assert trace.events == 6
    assert notes(trace)["not-events"].count == 4


def test_lists_of_objects_in_arguments_survive_damage_next_to_them(read: Any) -> None:
    nested = op("nested", 5, 1, rows=[{"name": str(i), "ts": i} for i in range(300)])
    trace = read([nested, "{oops}", nested, raw('a "b"'), nested], "minified")
    assert names(trace).count("nested") == 3
    assert notes(trace)["unreadable-events"].count == 1
    assert notes(trace)["mended"].count == 1


def test_damage_before_another_list_does_not_turn_that_list_into_events(read: Any) -> None:
    frames = [{"name": f"f{i}", "id": i} for i in range(40)]
    for bad in (raw('a "b"'), raw("a\\c"), "{oops}"):
        trace = read([*ops(3), bad, *ops(1)], tail={"stackFrames": frames, "record_shapes": 1})
        assert trace.events == (4 if bad == "{oops}" else 5)
        assert trace.facts["record_shapes"] == 1
        assert [note.id for note in trace.quality if note.id == "metadata-lost"] == []


def test_damage_in_the_very_last_event_is_not_taken_for_a_cut(read: Any) -> None:
    for bad in ('{"ph": "X", "name": "no end, "ts": 3}', "{oops}", '{"a": [1}'):
        trace = read([*ops(3), bad])
        assert trace.events == 3
        assert notes(trace)["unreadable-events"].count == 1
        assert "truncated" not in notes(trace)
        assert trace.facts["traceName"] == "trace.json"


def test_a_cut_file_says_where_its_last_whole_event_ended(read: Any) -> None:
    text = text_of(ops(50))
    last = text.rindex(b'{\n    "ph"')
    for end in range(last + 1, text.rindex(b"]")):
        trace = read(text[:end])
        complete = text[:end].rstrip().endswith(b"}\n  }")
        note = notes(trace)["truncated"]
        assert trace.events == (50 if complete else 49)
        assert note.byte_offset == (end if complete else last)
        assert note.count == (0 if complete else 1)
        assert len(trace.quality) == 1


def test_nesting_beyond_any_limit_loses_only_that_event(read: Any) -> None:
    deep = raw("a").replace('"Sequence number": 7', '"deep": ' + "[" * 100_000 + "]" * 100_000)
    trace = read([*ops(3), deep, *ops(3)])
    assert trace.events == 6
    assert notes(trace)["unreadable-events"].count == 1


def test_quotes_in_a_recording_of_ours_are_repaired(golden: Any) -> None:
    trace = read_trace(golden / "cpu_unescaped_quotes.json.gz")
    assert 'say "hi", then /go/' in trace.strings
    assert trace.events == 163
    assert (trace.host.kind == HostKind.ANNOTATION).sum() == 3
    assert [note.id for note in trace.quality] == ["mended"]


def test_device_events_are_recovered_like_any_other(read: Any) -> None:
    broken = json.dumps(kernel("k", 1, 1, 5)).replace('"k"', '"void k<"a">"')
    trace = read([*ops(2), broken, kernel("k2", 5, 1, 6)])
    assert len(trace.device) == 2
    assert 'void k<"a">' in trace.strings
