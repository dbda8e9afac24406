"""Every input that is not a whole trace: a clear refusal, or what is there with the loss named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from kineto_events import call, kernel, memory, op, ops, span

from layouts import packed, text_of
from stepscope import UnreadableInputError, read_trace
from stepscope.records.trace import Trace
from stepscope.trace import files
from stepscope.trace import files as regular_files


def refused(path: Path) -> str:
    """The message of the refusal, which names the file and fits one line."""
    with pytest.raises(UnreadableInputError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert caught.value.exit_code == 3
    assert path.name in message
    assert "\n" not in message
    return message


def read_or_refuse(path: Path) -> tuple[Trace | None, str]:
    try:
        return read_trace(path), ""
    except UnreadableInputError as error:
        return None, str(error)


def ids(trace: Trace) -> list[str]:
    return [note.id for note in trace.quality]


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def write(content: bytes) -> Path:
        path = tmp_path / "input.json"
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n  ", "is empty"),
        (b"hello world", "is not JSON: it begins with 'hello world' at byte 0"),
        (b"\x89PNG\r\n\x1a\n", "is not JSON"),
        (b"\xff\xfe{\x00", "is not JSON"),
        (b"PK\x03\x04", "is not JSON"),
        (b"[1, 2, 3]", "its list begins with '1, 2, 3]' at byte 1, which is no event"),
        (b"[]", "holds no events"),
        (b"{}", "no list of events"),
        (b'{"traceEvents": []}', "holds no events"),
        (b'{"traceEvents": [], "traceName": "x"}', "holds no events"),
        (b'{"traceEvents": [1, null, "a"]}', "none of the 3 elements of its list is an event"),
        (b'{"traceEvents": [', "ends at byte 17, before its first event is complete"),
        (b'{"traceEvents": [{"ph": "X", "na', "ends at byte 32, before its first event"),
        (b'{"traceEvents": [{oops}]}', "none of its events could be read (first at byte 17)"),
        (b'{"nodes": [], "links": []}', "is JSON but not a PyTorch trace"),
        (b'{"schemaVersion": 1, "dev', "no list of events before byte 25"),
        (b"{" * 200_000, "no list of events"),
        (b"[" * 200_000, "no event"),
        (b'{"traceEvents": ' + b"[" * 200_000, "before its first event is complete"),
        (b'{"a": NaN}', "no list of events"),
        (b"\x1f\x8b", "the gzip stream ends early"),
        (b"\x1f\x8b\x08\x00garbage", "the gzip stream"),
        (b"\x28\xb5\x2f\xfd", "the zstd stream ends early"),
        (b"\x28\xb5\x2f\xfd" + b"\xff" * 50, "the zstd stream is damaged"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_what_holds_no_events_is_refused_with_the_reason(
    put: Any, content: bytes, message: str
) -> None:
    assert message in refused(put(content))


def test_traces_of_other_tools_are_named_as_such(put: Any) -> None:
    browser = [
        {"ph": "X", "cat": "devtools", "name": "paint", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    ]
    assert "trace of another tool" in refused(put(json.dumps(browser).encode()))
    lines = b'{"a": 1}\n{"a": 2}\n'
    assert "no list of events" in refused(put(lines))


def test_an_empty_window_is_not_called_a_trace_of_another_tool(golden: Path) -> None:
    assert "without a recorded operator" in refused(golden / "cpu_empty_window.json.gz")


def test_a_file_whose_every_event_is_malformed_says_how(write_trace: Any) -> None:
    path = write_trace([op("a", 1, -5), op("b", 2, -1), op("c", None, 1)])
    message = refused(path)
    assert "none of its events (3) can be used" in message
    assert "2 with a negative duration" in message


def test_a_folder_is_not_a_trace(tmp_path: Path) -> None:
    assert "is a folder" in refused(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(put: Any) -> None:
    path = put(text_of(ops(1)))
    path.chmod(0)
    assert "no permission" in refused(path)


def test_a_refused_permission_is_reported(put: Any, monkeypatch: Any) -> None:
    path = put(text_of(ops(1)))

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert "no permission" in refused(path)


def test_a_name_that_no_file_can_have_is_refused() -> None:
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(UnreadableInputError):
            read_trace(name)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux's /proc")
def test_a_disk_that_fails_while_reading_is_no_crash() -> None:
    assert "Input/output error" in refused(Path("/proc/self/mem"))


def test_a_disk_that_fails_half_way_is_no_crash(put: Any, monkeypatch: Any) -> None:
    path = put(text_of(ops(300)))
    really = regular_files.open_file

    class Failing:
        def __init__(self, file: Any) -> None:
            self.file, self.left = file, 20_000

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def read(self, size: int) -> bytes:
            self.left -= size
            if self.left < 0:
                raise OSError(116, "Stale file handle")
            return self.file.read(size)

    monkeypatch.setattr(files, "PIECE_BYTES", 8000)
    monkeypatch.setattr(regular_files, "open_file", lambda path: Failing(really(path)))
    assert "Stale file handle" in refused(path)


def test_a_file_cut_anywhere_gives_its_whole_events_or_says_there_are_none(put: Any) -> None:
    events = [op("a", 1, 1, note=[{"x": 1}, {"name": "]}"}]), kernel("k", 2, 1, 5), *ops(1)]
    for layout in ("kineto", "minified", "events_first", "bare_list"):
        text = text_of(events, layout)
        counts = []
        first = text.index(b"[{" if layout == "bare_list" else b'"traceEvents"')
        for end in [*range(0, first, 9), *range(first, len(text))]:
            path = put(text[:end])
            trace, message = read_or_refuse(path)
            counts.append(trace.events if trace else 0)
            if trace is None:
                assert path.name in message
                continue
            note = trace.quality[0]
            if end > text.index(b"]", text.rindex(b'"External id"')):
                assert note.id == "metadata-lost"
            else:
                assert note.id == "truncated"
                assert note.byte_offset is not None
                assert note.byte_offset <= end
        assert counts == sorted(counts)
        assert set(counts) == {0, 1, 2, 3}


@pytest.mark.parametrize("compression", ["gzip", "gzip-members", "zstd", "zstd-frames"])
def test_a_compressed_file_that_ends_early_gives_what_it_has(put: Any, compression: str) -> None:
    rng = np.random.default_rng(0)
    noise = [op("x" + rng.bytes(300).hex(), i, 1) for i in range(2000)]
    whole = packed(text_of(noise), compression)
    last = 0
    for share in (0.1, 0.3, 0.5, 0.7, 0.95):
        path = put(whole[: int(len(whole) * share)])
        trace, message = read_or_refuse(path)
        if trace is None:
            assert share < 0.2
            assert "ends early" in message
            continue
        assert last <= trace.events < 2000
        last = trace.events
        assert ids(trace)[0] == "truncated"
        assert trace.quality[0].byte_offset
    assert last > 1500


def test_a_gzip_that_is_damaged_in_the_middle_gives_the_part_before(put: Any) -> None:
    rng = np.random.default_rng(0)
    noise = [op("x" + rng.bytes(30).hex(), i, 1) for i in range(3000)]
    whole = bytearray(gzip.compress(text_of(noise)))
    whole[len(whole) // 2] ^= 0xFF
    trace = read_trace(put(bytes(whole)))
    assert 1400 < trace.events <= 3000
    assert "truncated" in ids(trace)
    assert "damaged" in next(n.detail for n in trace.quality if n.id == "truncated")


def test_a_wrong_checksum_only_adds_a_note(put: Any) -> None:
    whole = bytearray(gzip.compress(text_of(ops(300))))
    whole[-6] ^= 0xFF
    trace = read_trace(put(bytes(whole)))
    assert trace.events >= 299
    assert ids(trace)[0] == "truncated"


def test_a_zstd_that_is_damaged_in_the_middle_gives_the_part_before(put: Any) -> None:
    rng = np.random.default_rng(0)
    noise = [op("x" + rng.bytes(300).hex(), i, 1) for i in range(3000)]
    whole = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(text_of(noise)))
    middle = len(whole) // 2
    whole[middle : middle + 200] = bytes(200)
    trace = read_trace(put(bytes(whole)))
    assert 1000 < trace.events < 3000
    assert "truncated" in ids(trace)


@pytest.mark.parametrize("junk", [b"\0" * 300_000, b"trailing words", b"\x1f"])
def test_bytes_after_the_last_gzip_member_are_ignored_as_gzip_does(put: Any, junk: bytes) -> None:
    trace = read_trace(put(gzip.compress(text_of(ops(5))) + junk))
    assert trace.events == 5
    assert trace.quality == ()


def test_text_after_the_trace_is_reported(put: Any) -> None:
    text = text_of(ops(5), "minified")
    for junk in (b"x", text, b"}"):
        trace = read_trace(put(text + junk))
        assert trace.events == 5
        assert "metadata-lost" in ids(trace)
    padded = read_trace(put(text + b"\0" * 100))
    assert (padded.events, padded.quality, padded.rank) == (5, (), 3)


@pytest.mark.parametrize(
    ("duration", "reason"),
    [
        (-1, "with a negative duration"),
        (-1e300, "with a negative duration"),
        (1e13 + 0.5, "longer than 100 days"),
        (10**15, "longer than 100 days"),
        (1e300, "longer than 100 days"),
        (None, "without a duration"),
        ("long", "without a duration"),
    ],
)
def test_durations_that_cannot_be_are_left_out_and_counted(
    write_trace: Any, duration: Any, reason: str
) -> None:
    events = [*ops(2), kernel("good", 5, 1, 3), op("a", 50, duration), kernel("b", 60, duration)]
    trace = read_trace(write_trace(events))
    assert trace.events == 5
    assert (len(trace.host), len(trace.device)) == (2, 1)
    [note] = [note for note in trace.quality if note.id == "malformed"]
    assert (note.count, reason in note.detail) == (2, True)


def test_epoch_times_with_decimals_next_to_long_durations_are_exact(write_trace: Any) -> None:
    base = "17000000001234"
    rows = [
        json.dumps(event).replace('"@', base).replace('@"', "")
        for event in (
            op("a", "@56.789@", 5.5),
            kernel("k", "@57.001@", 1e13 + 0.5),
            kernel("k", "@58.002@", 2),
        )
    ]
    trace = read_trace(write_trace(rows))
    assert trace.host.start_ns.tolist() == [1_700_000_000_123_456_789]
    assert trace.device.start_ns.tolist() == [1_700_000_000_123_458_002]
    assert trace.events == 3


def test_duplicate_correlations_link_to_the_earliest_call(write_trace: Any) -> None:
    trace = read_trace(write_trace([call("a", 9, 1, 5), call("b", 1, 1, 5), kernel("k", 20, 1, 5)]))
    assert trace.strings[trace.host.name[trace.device.launch[0]]] == "b"


def test_memory_events_without_a_time_are_counted(write_trace: Any) -> None:
    trace = read_trace(write_trace([*ops(1), memory(1, 8), memory(None, 8)]))
    assert len(trace.memory) == 1
    assert [(note.id, note.count) for note in trace.quality] == [("malformed", 1)]


def test_a_trace_of_python_frames_alone_is_a_trace(write_trace: Any) -> None:
    assert read_trace(write_trace([span("python_function", "f", 1, 1)])).events == 1


def test_progress_reaches_the_end_of_the_file(write_trace: Any) -> None:
    for compression in ("plain", "gzip", "zstd"):
        path = write_trace(ops(2000), compression=compression)
        seen: list[tuple[int, int]] = []
        read_trace(path, progress=lambda done, total, seen=seen: seen.append((done, total)))
        size = path.stat().st_size
        assert seen[-1] == (size, size)
        assert seen == sorted(seen)
