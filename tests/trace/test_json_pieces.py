"""Whatever the layout and wherever the text is cut, the same events and keys come out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kineto_events import op, ops

from layouts import COMPRESSIONS, HEAD, LAYOUTS, TAIL, text_of
from stepscope import UnreadableInputError, read_trace
from stepscope.trace import files
from stepscope.trace.files import Limits
from stepscope.trace.formats.decode_events import Losses, decode_events
from stepscope.trace.formats.events import Event
from stepscope.trace.formats.json_brackets import escape_quotes, repair, scan_brackets
from stepscope.trace.formats.json_pieces import EventText

NASTY = [
    '}, {"ph": "X"',
    '"traceEvents": [',
    '{"traceEvents": [{"ph": "X"}]}',
    "}\n  },\n  {\n",
    "}],",
    "[[[{{{",
    "\\",
    '\\"',
    '"',
    "é\N{SNOWMAN}\U0001f600",
    "C:\\new\\x",
    ": nan, inf]",
]
TEXTS = st.one_of(st.sampled_from(NASTY), st.text(max_size=20))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["name", "ph", "ts", "x", "args"]), inner, max_size=3),
    ),
    max_leaves=6,
)
EVENTS = st.lists(
    st.builds(
        lambda name, ts, note: op(name, ts, 1, note=note),
        TEXTS,
        st.integers(0, 10**12).map(lambda ns: ns / 1000),
        VALUES,
    ),
    min_size=1,
    max_size=8,
)


def read_in_pieces(
    text: bytes, size: int, limits: Limits | None = None
) -> tuple[list[Event], EventText, Losses]:
    """Every event of a text that arrives in chunks of that many bytes."""
    limits = limits or Limits()
    chunks = (text[at : at + size] for at in range(0, len(text), size))
    reader, events, losses = EventText(chunks, "trace.json", limits), [], Losses()
    while (piece := reader.next_piece()) is not None:
        batch = decode_events(piece, Event, limits)
        if batch.events:
            reader.mark_used()
        events += batch.events
        losses.merge(batch.losses)
        if batch.closed_at is not None:
            reader.close(piece, batch.closed_at)
        elif batch.resume is not None:
            reader.give_back(piece, batch.resume)
    return events, reader, losses


def essence(events: list[Any]) -> list[tuple[Any, ...]]:
    """Events of json and of ours, comparable."""
    keys = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
    return [
        tuple(e[k] for k in keys) if isinstance(e, dict) else tuple(getattr(e, k) for k in keys)
        for e in events
    ]


@pytest.mark.few(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@given(events=EVENTS, size=st.sampled_from([1, 2, 3, 7, 16, 61, 200, 1000, 10**6]))
@settings(max_examples=60)
@example(events=[op("a", 1, 1, note=[{"name": "x"}, {"name": "y"}])] * 4, size=50)
@example(events=[op("a", 1, 1, note=[{"x": "}, {"}, {"x": 1}])] * 4, size=30)
def test_every_layout_cut_anywhere_gives_the_same_events(
    layout: str, events: list[dict[str, Any]], size: int
) -> None:
    text = text_of(events, layout)
    json.loads(text)  # the layouts themselves are JSON
    found, reader, losses = read_in_pieces(text, size)
    assert essence(found) == essence(events)
    assert losses == Losses()
    assert reader.finished
    assert reader.outside.lost == []
    assert reader.outside.keys == ({} if layout.startswith("bare") else {**HEAD, **TAIL})


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_compression_reads_the_same(
    layout: str, compression: str, write_trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 3000)
    monkeypatch.setattr(files, "_READ_BYTES", 100)
    events = ops(200)
    path = write_trace(events, layout, compression=compression, bom=layout == "dumped")
    trace = read_trace(path)
    assert trace.events == 200
    assert trace.host.start_ns.tolist() == [i * 10_000 for i in range(200)]
    assert trace.rank == (None if layout.startswith("bare") else 3)
    assert trace.quality == ()


def test_byte_order_mark_is_skipped_however_it_is_cut() -> None:
    text = text_of(ops(3), "minified", bom=True)
    for size in (1, 2, 3, 5, 1000):
        assert len(read_in_pieces(text, size)[0]) == 3


def test_metadata_before_the_events_may_be_huge_and_name_the_key() -> None:
    noise = {"list": ["x" * 50, {"traceEvents": [{"ph": "X"}]}] * 20_000, "traceEvents": 1}
    head = {"metadata": noise, "note": '"traceEvents": [', **HEAD}
    events, reader, losses = read_in_pieces(text_of(ops(5), "dumped", head=head), 1 << 16)
    assert essence(events) == essence(ops(5))
    assert reader.outside.keys["note"] == '"traceEvents": ['
    assert reader.outside.keys["distributedInfo"]["rank"] == 3
    assert losses == Losses()


@pytest.mark.parametrize("size", [50, 333, 1 << 20])
@pytest.mark.parametrize("layout", ["kineto", "minified", "indented"])
def test_a_second_list_after_the_events_is_not_events(layout: str, size: int) -> None:
    foreign = {
        "stackFrames": [{"name": f"f{i}", "id": i} for i in range(300)],
        "distributedInfo": {"rank": 5},
    }
    events, reader, losses = read_in_pieces(text_of(ops(20), layout, tail=foreign), size)
    assert essence(events) == essence(ops(20))
    assert len(reader.outside.keys["stackFrames"]) == 300
    assert reader.outside.keys["distributedInfo"] == {"rank": 5}
    assert losses == Losses()
    assert reader.finished


def test_an_empty_list_of_events_still_gives_the_keys_after_it() -> None:
    text = b'{"traceEvents": [ ], "other": [{"name": "x"}, {"name": "y"}], "rank": 1}'
    for size in (1, 5, 1000):
        events, reader, _ = read_in_pieces(text, size)
        assert events == []
        assert reader.outside.keys["rank"] == 1


def test_an_event_larger_than_any_piece_is_read_whole() -> None:
    big = op("big", 1, 1, note="}, {" * 100_000)
    events, _, losses = read_in_pieces(text_of([*ops(3), big, *ops(3)], "minified"), 4096)
    assert [e.name for e in events].count("big") == 1
    assert len(events) == 7
    assert losses == Losses()


def test_offsets_point_at_the_event_however_the_text_is_cut() -> None:
    events: list[Any] = ops(200)
    events[150] = '{"ph": "X", "broken'
    text = text_of(events)
    for size in (64, 100, 1000, 5000, 10**6):
        _, _, losses = read_in_pieces(text, size)
        assert losses.unreadable == 1
        assert losses.first_unreadable == text.index(b'{"ph": "X", "broken')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"hello", "not JSON: it begins with 'hello' at byte 0"),
        (b"\n  12", "not JSON: it begins with '12' at byte 3"),
        (b"PK\x03\x04", "not JSON"),
        (b'{"nodes": [1, 2], "edges": []}', r"no traceEvents \(found: nodes, edges\)"),
        (b"{}", "no list of events before byte 2"),
        (b'{"traceEvents": 5}', "no traceEvents"),
        (b'{"a": {"traceEvents": []}}', "no traceEvents"),
        (b'{"schemaVersion": 1, "dev', "no list of events before byte 25"),
        (b'{"a": ' * 100_000, "no list of events"),
    ],
    ids=lambda value: repr(value[:16]),
)
def test_text_without_a_list_of_events_is_refused_with_the_place(text: bytes, message: str) -> None:
    with pytest.raises(UnreadableInputError, match=f"trace.json.*{message}"):
        EventText([text], "trace.json")


def test_slips_in_the_keys_around_the_events_are_repaired() -> None:
    text = b'{"metadata": {"loss": NaN}, "distributedInfo": {"rank": 2}, "traceEvents": ['
    text += json.dumps(ops(1)[0]).encode() + b'], "path": "C:\\work", "size": 7}'
    _, reader, _ = read_in_pieces(text, 1000)
    assert reader.outside.keys["distributedInfo"] == {"rank": 2}
    assert reader.outside.keys["metadata"] == {"loss": None}
    assert reader.outside.keys["path"] == "C:\\work"
    assert reader.outside.keys["size"] == 7
    assert reader.outside.lost == []


def test_unreadable_keys_around_the_events_are_reported_and_lose_no_event() -> None:
    text = b'{"a": "un"quoted", "traceEvents": [%s], "b": }' % json.dumps(ops(1)[0]).encode()
    events, reader, _ = read_in_pieces(text, 1000)
    assert len(events) == 1
    assert reader.outside.lost == ["the keys before the events", "what follows the events"]


def test_a_tail_without_end_is_not_held_in_memory() -> None:
    text = text_of(ops(2), "minified", tail={"blob": "x" * 300_000})
    events, reader, _ = read_in_pieces(text, 1000, Limits(event_bytes=50_000))
    assert len(events) == 2
    assert reader.finished
    assert len(reader.outside.lost) == 1
    assert reader.size < 250_000


# Brackets and quotes alone show where events end, also in text that does not decode.


def test_a_scan_tells_complete_from_unfinished_from_damaged_text() -> None:
    assert scan_brackets(b'{"a": [1, "]}"]}, {"b": 2}').complete
    assert scan_brackets(b'{"a": "}, {", "b": {}}, {"c": 1}').cuts == [(22, 24)]
    assert scan_brackets(b'{"a": [{"b": 1}').open_brackets == b"{["
    assert scan_brackets(b'{"a": "text').in_string
    assert scan_brackets(b'{"a": 1}] , "b": 2}').closed_at == 8
    assert scan_brackets(b'{"a": [1}').mismatched
    assert scan_brackets(b"{}}").mismatched


# Repairs change the text that a decoder refuses, never the meaning of valid text.


@pytest.mark.parametrize(
    "text", [b'{"a": "b\\\\c \\u00e9 \\ud83d\\ude00 nan", "n": [1.5, -2e10, true]}', b'{"a": 1}']
)
def test_repair_leaves_the_meaning_of_valid_text_alone(text: bytes) -> None:
    assert json.loads(repair(text)) == json.loads(text)
    assert escape_quotes(text) == text


def test_a_name_does_not_swallow_the_event_after_it() -> None:
    text = b'{"name": "a", "ph" "X", "ts": 5, "dur": 1}'
    assert escape_quotes(text) == text
