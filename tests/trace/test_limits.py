"""Memory and time follow what is kept: what is too long is passed over, cut or refused."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from kineto_events import op, ops

from layouts import text_of
from stepscope import UnreadableInputError, UsageError, read_trace
from stepscope.trace import read
from stepscope.trace.files import NAME_CHARACTERS, Limits
from stepscope.trace.formats.kineto import read_kineto

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.quality import Note
    from stepscope.records.trace import Trace

SMALL = Limits(event_bytes=80_000, expansion=100, expansion_from_bytes=2_000_000)
EVENT = json.dumps(op("aten::mm", 10, 5)).encode()
OPEN = b'{"schemaVersion": 1, "traceEvents": ['


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def write(*content: bytes, name: str = "input.json") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(content))
        return path

    return write


def notes(trace: Trace) -> dict[str, Note]:
    return {note.id: note for note in trace.quality}


def refusal(path: Path, limits: Limits = SMALL) -> str:
    with pytest.raises(UnreadableInputError) as caught:
        read_kineto(path, limits=limits)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


LONG = {
    "a string": b'{"ph": "X", "note": "' + b"x" * 200_000 + b'"}',
    "a name": b'{"ph": "X", "name": "' + b"x" * 200_000 + b'"}',
    "a string of escapes": b'{"ph": "X", "note": "' + b'\\"' * 100_000 + b'"}',
    "a string that looks like events": b'{"note": "' + b'}, {\\"ph\\": 1' * 20_000 + b'"}',
    "a number": b'{"ph": "X", "ts": ' + b"9" * 200_000 + b"}",
    "many keys": b'{"ph": "X", "args": {' + b'"a": 1, ' * 30_000 + b'"b": 2}}',
    "many shapes": b'{"args": {"Input Dims": [' + b"[1, 2], " * 30_000 + b"[3]]}}",
    "objects that begin as events do": b'{"l": [' + b'{"name": 1}, ' * 12_000 + b"{}]}",
    "deep nesting": b'{"l": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("long", LONG.values(), ids=LONG)
def test_an_event_that_is_too_long_is_skipped_and_its_neighbours_are_kept(
    put: Any, long: bytes
) -> None:
    path = put(OPEN, EVENT, b", ", long, b", ", EVENT, b", ", EVENT, b'], "traceName": "x"}')
    trace = read_kineto(path, limits=Limits(event_bytes=80_000))
    assert trace.events == 3
    note = notes(trace)["oversized-events"]
    assert note.count == 1
    assert note.byte_offset == len(OPEN) + len(EVENT) + 2
    assert long[:10].decode() in note.detail
    assert "STEPSCOPE_MAX_EVENT_MB" in note.detail
    assert trace.facts["traceName"] == "x"
    assert len(trace.quality) == 1


@pytest.mark.parametrize("long", LONG.values(), ids=LONG)
def test_the_same_event_is_read_whole_below_the_limit(put: Any, long: bytes) -> None:
    path = put(OPEN, EVENT, b", ", long, b", ", EVENT, b'], "traceName": "x"}')
    trace = read_kineto(path)
    assert trace.events == (2 if b"[[[" in long else 3)
    assert "oversized-events" not in notes(trace)
    assert trace.facts["traceName"] == "x"


def test_events_between_large_and_too_long_are_read_one_by_one(put: Any) -> None:
    limits = Limits(event_bytes=400_000)  # large are those over 50,000
    long = [op(f"long{i}", 100 + i, 1, note="x" * 60_000 * (i + 1)) for i in range(5)]
    rows = [*ops(40), long[0], long[4], *ops(3), long[2], long[1], long[3], *ops(200)]
    for layout in ("kineto", "minified", "indented", "bare_list"):
        trace = read_kineto(put(text_of(rows, layout)), limits=limits)
        assert trace.events == len(rows)
        assert trace.quality == ()
        assert sum(trace.strings[code].startswith("long") for code in trace.host.name) == 5


def test_an_argument_that_is_too_long_is_left_out_of_an_event_that_is_kept(put: Any) -> None:
    shapes = [[i, 2] for i in range(9_000)]
    big = op("big", 50, 3, **{"Input Dims": shapes, "Sequence number": 7})
    text = text_of([*ops(3), big, *ops(3)])
    trace = read_kineto(put(text), limits=Limits(event_bytes=400_000))
    row = [trace.strings[code] for code in trace.host.name].index("big")
    assert trace.host.shapes[row] == -1
    assert trace.host.sequence[row] == 7
    note = notes(trace)["shortened"]
    assert note.count == 1
    begin = text.index(b'"big"')
    assert begin - 80 < (note.byte_offset or 0) < begin
    assert "[[0" in note.detail


def test_names_that_are_too_long_are_cut_and_stay_distinct(put: Any) -> None:
    begin = "n" * NAME_CHARACTERS
    rows = [op(begin + end, 100 + i, 1) for i, end in enumerate(("a", "b", "b"))]
    trace = read_kineto(put(text_of([*ops(3), *rows, op(begin, 200, 1)])))
    names = [trace.strings[code] for code in trace.host.name][3:]
    assert [len(name) for name in names] == [NAME_CHARACTERS] * 4
    assert len(set(names)) == 3
    assert names[3] == begin
    assert "65,537 characters" in names[0]
    assert notes(trace)["shortened"].count == 3
    assert "odd-types" not in notes(trace)


@pytest.mark.parametrize("filling", [b" ", b"[", b'"a": 1, ', b'"', b"9", b'{"a": ', b"x", b"\\"])
def test_a_head_without_end_is_refused_with_place_and_override(put: Any, filling: bytes) -> None:
    for begin in (b"{", b'{"a": "'):
        message = refusal(put(begin, filling * (2_000_000 // len(filling))))
        assert "no list of events" in message
        assert "byte" in message


def test_blanks_without_end_are_refused(put: Any) -> None:
    message = refusal(put(b" " * 2_000_000))
    assert "no list of events in the first" in message
    assert "STEPSCOPE_MAX_EVENT_MB" in message


@pytest.mark.parametrize(
    "filling", [b" ", b",", b"[", b"{", b"}", b"\0", b"9", b'"', b"1, ", b"\xff"]
)
def test_text_without_events_ends_the_reading_and_keeps_what_was_read(
    put: Any, filling: bytes
) -> None:
    path = put(OPEN, EVENT, b", ", filling * (4_000_000 // len(filling)))
    trace = read_kineto(path, limits=SMALL)
    assert trace.events == 1
    note = notes(trace)["truncated"]
    assert "no event follows" in note.detail or "could not be read" in note.detail
    assert (note.byte_offset or 0) < 3_000_000


def test_text_without_any_event_is_refused_where_reading_stopped(put: Any) -> None:
    message = refusal(put(b"[", b"," * 3_000_000))
    assert "holds no event that can be read" in message
    assert "STEPSCOPE_MAX_EVENT_MB" in message


def test_keys_of_more_values_than_fit_keep_the_best_known(put: Any) -> None:
    noise = b'"a": [' + b"[]," * 2_000 + b"1], "
    known = b'"distributedInfo": {"rank": 3, "world_size": 8}'
    for text in (
        b"{" + noise + known + b', "traceEvents": [' + EVENT + b"]}",
        OPEN + EVENT + b"], " + noise + known + b"}",
    ):
        trace = read_kineto(put(text), limits=Limits(values=1_000))
        assert (trace.rank, trace.world_size) == (3, 8)
        assert "best known" in notes(trace)["metadata-lost"].detail


def test_a_second_list_of_events_is_reported(put: Any) -> None:
    trace = read_kineto(put(OPEN, EVENT, b'], "traceEvents": [', EVENT, b"]}"))
    assert trace.events == 1
    assert "twice" in notes(trace)["metadata-lost"].detail


@pytest.mark.parametrize("filling", [b" " * 40_960, b"{}," * 900, b'{"ph": "M"},' * 300])
def test_a_file_that_expands_beyond_any_trace_is_refused_with_the_override(
    put: Any, filling: bytes
) -> None:
    # Compressed to next to nothing.
    whole = zstandard.ZstdCompressor().compress(filling * 300)
    for packed in [gzip.compress(filling * 300), whole]:
        begin = gzip.compress if packed.startswith(b"\x1f") else zstandard.compress
        path = put(begin(OPEN + EVENT + b","), packed)
        limits = Limits(event_bytes=4 << 20, expansion=50, expansion_from_bytes=600_000)
        message = refusal(path, limits)
        assert "of its text" in message
        assert "STEPSCOPE_MAX_EXPANSION above 50" in message
        higher = Limits(event_bytes=4 << 20, expansion=99_999, expansion_from_bytes=600_000)
        assert read_kineto(path, limits=higher).events >= 1


def test_one_event_repeated_is_kept_until_it_expands_too_far(put: Any) -> None:
    path = put(gzip.compress(OPEN + b",".join([EVENT] * 20_000) + b"]}", 9))
    assert path.stat().st_size * 100 < 20_000 * len(EVENT)
    assert "STEPSCOPE_MAX_EXPANSION" in refusal(path)
    assert read_kineto(path).events == 20_000


def test_a_trace_that_is_not_compressed_never_expands(put: Any) -> None:
    path = put(OPEN, b",".join([EVENT] * 20_000), b"]}")
    assert read_kineto(path, limits=SMALL).events == 20_000


def test_memory_does_not_grow_with_text_that_is_left_out(put: Any) -> None:
    limits = Limits(event_bytes=1 << 20, expansion=10**6)
    long = b'{"ph": "X", "note": "' + b"x" * 40_000_000 + b'"}'
    path = put(gzip.compress(OPEN + EVENT + b"," + long + b"," + EVENT + b"]}"))
    read_kineto(path, limits=limits)
    tracemalloc.start()
    try:
        read_kineto(path, limits=limits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20


def test_overrides_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_MAX_EXPANSION", "2000")
    monkeypatch.setenv("STEPSCOPE_MAX_EVENT_MB", " 64 ")
    chosen = Limits.chosen()
    assert (chosen.expansion, chosen.event_bytes) == (2000, 64 << 20)
    assert chosen.outside_bytes == 128 << 20


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "9" * 5000, "٣"])
def test_an_override_that_is_not_a_number_is_wrong_use(
    put: Any, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_MAX_EXPANSION", value)
    with pytest.raises(UsageError, match="STEPSCOPE_MAX_EXPANSION"):
        read_trace(put(OPEN, EVENT, b"]}"))


def test_thousands_of_tiny_members_and_frames_read_as_one_text(put: Any) -> None:
    parts = [OPEN, *[EVENT + b","] * 3000, EVENT, b"]}"]
    skippable = b"\x5a\x2a\x4d\x18\x05\0\0\0hello"
    for packed in (
        b"".join(map(gzip.compress, parts)),
        b"".join(gzip.compress(b"") + gzip.compress(part) for part in parts),
        b"".join(map(zstandard.compress, parts)),
        skippable + skippable.join(map(zstandard.compress, parts)) + skippable,
    ):
        trace = read_kineto(put(packed))
        assert trace.events == 3001
        assert trace.quality == ()


def test_many_empty_members_are_an_empty_file(put: Any) -> None:
    assert "is empty" in refusal(put(gzip.compress(b"") * 5000))
    assert "is empty" in refusal(put(zstandard.compress(b"") * 5000))


def test_a_zstd_window_beyond_the_limit_says_what_to_do(put: Any) -> None:
    frame = b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + b"\x01\0\0"  # a window of 2 GB, no text
    message = refusal(put(frame))
    assert "window" in message
    assert "zstd -d --long=31" in message


def test_what_is_compressed_twice_or_not_utf_8_is_named(put: Any) -> None:
    text = OPEN + EVENT + b"]}"
    assert "compressed twice" in refusal(put(gzip.compress(gzip.compress(text))))
    assert "compressed twice" in refusal(put(gzip.compress(zstandard.compress(text))))
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        assert "UTF-16" in refusal(put(text.decode().encode(encoding)))


def sparse(path: Path) -> Path:
    os.truncate(path, 100 << 30)
    return path


@pytest.mark.skipif(not hasattr(os, "SEEK_HOLE"), reason="this system cannot tell holes")
def test_a_sparse_file_of_100_gb_is_answered_at_once(put: Any, tmp_path: Path) -> None:
    try:
        zeros = sparse(put(b""))
    except OSError as error:
        pytest.skip(f"no sparse files here: {error}")
    with pytest.raises(UnreadableInputError, match="is not JSON"):
        read_trace(zeros)
    closed = read_trace(sparse(put(OPEN, EVENT, b"]}")))
    assert "metadata-lost" in notes(closed)
    opened = read_trace(sparse(put(OPEN, EVENT, b",")))
    assert "truncated" in notes(opened)
    assert (closed.events, opened.events) == (1, 1)


def test_a_large_file_that_is_not_a_trace_is_refused_before_its_digest(
    put: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "_LOOK_FROM_BYTES", 70_000)
    monkeypatch.setattr("stepscope.trace.cache.Cache.key", None)
    with pytest.raises(UnreadableInputError, match="is not JSON"):
        read_trace(put(b"x" * 80_000))


def test_endless_damage_ends_the_reading(put: Any) -> None:
    path = put(OPEN, EVENT, b', {"ph":x}' * 160_000, b"]}")
    trace = read_kineto(path, limits=Limits(damaged=20_000))
    assert "events in a row could not be read" in notes(trace)["truncated"].detail
