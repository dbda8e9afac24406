"""Thousands of damaged traces: an answer or a refusal, in no time, and never a wrong shape."""

from __future__ import annotations

import gzip
import json
import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope import StepscopeError, read_trace
from stepscope.records.trace import HostKind, Trace
from stepscope.trace.cache import find_inconsistency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.random import Generator

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDENS = ("cuda_step", "cpu_stack_memory", "cuda_graph", "cpu_unescaped_quotes")
ROUNDS = int(os.environ.get("STEPSCOPE_FUZZ_ROUNDS", "40"))  # of each mutation on each golden
REWRITTEN = 30  # of each rewriting of each golden
# Each block is another draw of the same mutations; `make test-slow` has the others.
BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.slow) for block in (1, 2))]
SECONDS = 5.0
TOKENS = [
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\0", b"\xff", b"\n", b" ", b"}]", b"],"),
    *(b"NaN", b"-inf", b"null", b"1e999", b'"ph"', b'"traceEvents": [', b"}, {", b"]}", b"\\u"),
    *(
        b"\xef\xbb\xbf",
        b"9" * 40,
        b"[" * 500,
        b'{"a":' * 500,
        b"\x1f\x8b",
        b'},\n  {\n    "ph": "X"',
    ),
]
EVENT = b'{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 2, "pid": 3, "tid": 3}'
LOSSES = {"unreadable-events", "not-events", "truncated"}
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, -1e308, 10**30, -(2**63), 2**31, "", "x", "12", "1.5", "NaN"),
    *([], [1], [[]], [{"ph": "X"}], {}, {"name": {}}, "\ud83d\ude00", "a\0b", "}, {", '"'),
]


def text_of_golden(name: str) -> bytes:
    return gzip.decompress((GOLDEN / f"{name}.json.gz").read_bytes())


TEXTS = {name: text_of_golden(name) for name in GOLDENS}


@contextmanager
def no_hang() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TimeoutError("the reader hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_or_refuse(path: Path, content: bytes) -> Trace | None:
    path.write_bytes(content)
    trace, refusal = None, None
    with no_hang():
        try:
            trace = read_trace(path, cache=False)
        except StepscopeError as error:
            refusal = error
    if trace is not None:
        check_shape(trace)
    else:
        assert refusal is not None
        assert refusal.exit_code == 3
        assert str(path) in str(refusal)
    return trace


def check_shape(trace: Trace) -> None:
    """What every consumer relies on; test_cache.py shows that each broken rule is seen."""
    host, device = trace.host, trace.device
    assert find_inconsistency(trace) is None
    assert 0 < len(host) + len(device) + len(trace.memory) <= trace.events
    launched = device.launch[device.launch >= 0]
    assert (host.kind[launched] == HostKind.RUNTIME).all()
    for note in trace.quality:
        assert note.detail
        assert note.count is None or note.count >= 0
        assert note.byte_offset is None or note.byte_offset >= 0


def lost(trace: Trace) -> int:
    return sum(note.count or 0 for note in trace.quality if note.id in LOSSES)


def place(rng: Generator, text: bytes) -> int:
    return int(rng.integers(0, len(text)))


def cut(rng: Generator, text: bytes) -> bytes:
    return text[: place(rng, text)]


def flip(rng: Generator, text: bytes) -> bytes:
    at = place(rng, text)
    return text[:at] + bytes([text[at] ^ (1 << int(rng.integers(8)))]) + text[at + 1 :]


def flip_many(rng: Generator, text: bytes) -> bytes:
    data = bytearray(text)
    for _ in range(int(rng.integers(2, 200))):
        data[place(rng, text)] = int(rng.integers(256))
    return bytes(data)


def insert(rng: Generator, text: bytes) -> bytes:
    at = place(rng, text)
    return text[:at] + TOKENS[int(rng.integers(len(TOKENS)))] + text[at:]


def delete(rng: Generator, text: bytes) -> bytes:
    at = place(rng, text)
    return text[:at] + text[at + int(rng.integers(1, 400)) :]


def repeat(rng: Generator, text: bytes) -> bytes:
    at = place(rng, text)
    return text[: at + int(rng.integers(1, 3000))] + text[at:]


def splice(rng: Generator, text: bytes) -> bytes:
    other = TEXTS[GOLDENS[int(rng.integers(len(GOLDENS)))]]
    return text[: place(rng, text)] + other[place(rng, other) :]


def sparse_copy(rng: Generator, text: bytes) -> bytes:
    """A block of zeros, as a file system leaves it after a crash."""
    at = place(rng, text)
    size = int(rng.integers(1, 4096))
    return text[:at] + b"\0" * min(size, len(text) - at) + text[at + size :]


MUTATIONS = [cut, flip, flip_many, insert, delete, repeat, splice, sparse_copy]


@pytest.mark.few(8)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("block", BLOCKS)
def test_mutated_text_is_read_in_shape_or_refused(
    name: str, mutate: Callable[[Generator, bytes], bytes], block: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng([GOLDENS.index(name), MUTATIONS.index(mutate), block])
    text = TEXTS[name]
    read = 0
    for _ in range(ROUNDS):
        trace = read_or_refuse(tmp_path / "mutated.json", mutate(rng, text))
        read += trace is not None
    assert read > ROUNDS // 4


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_small_edit_among_the_events_loses_few_of_them(
    name: str, block: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng([7, block])
    text = TEXTS[name]
    whole = read_or_refuse(tmp_path / "whole.json", text)
    assert whole is not None
    first = text.index(b'"traceEvents"') + 20
    last = text.rindex(b"]")
    kept = []
    for _ in range(ROUNDS):
        at = int(rng.integers(first, last))
        edit = [
            text[:at] + bytes([int(rng.integers(32, 127))]) + text[at + 1 :],
            text[:at] + text[at + 1 :],
            text[:at] + b'"' + text[at:],
        ]
        trace = read_or_refuse(tmp_path / "edited.json", edit[int(rng.integers(3))])
        assert trace is not None
        kept.append(trace.events)
        assert whole.events - 2 <= trace.events + lost(trace) <= whole.events + 2
    assert min(kept) >= whole.events - 2


def swap_value(rng: Generator, document: dict[str, Any]) -> None:
    events = document["traceEvents"]
    for _ in range(int(rng.integers(1, 6))):
        target = events[int(rng.integers(len(events)))]
        if isinstance(target, dict) and isinstance(target.get("args"), dict) and rng.random() < 0.5:
            target = target["args"]
        if isinstance(target, dict) and target:
            target[list(target)[int(rng.integers(len(target)))]] = choose(rng, VALUES)


def swap_everywhere(rng: Generator, document: dict[str, Any]) -> None:
    key = str(choose(rng, ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id"]))
    for event in document["traceEvents"]:
        event[key] = choose(rng, VALUES)


def drop_keys(rng: Generator, document: dict[str, Any]) -> None:
    for event in document["traceEvents"]:
        for key in list(event):
            if rng.random() < 0.05:
                del event[key]


def odd_head(rng: Generator, document: dict[str, Any]) -> None:
    for key in list(document):
        if key != "traceEvents" and rng.random() < 0.5:
            document[key] = choose(rng, VALUES)
    document["distributedInfo"] = {
        key: choose(rng, VALUES) for key in ("rank", "world_size", "backend", "pg_config")
    }
    document["baseTimeNanoseconds"] = choose(rng, VALUES)


def reorder(rng: Generator, document: dict[str, Any]) -> None:
    events = document["traceEvents"]
    rng.shuffle(events)
    document["traceEvents"] = events[: int(rng.integers(1, len(events)))] + events[:20]
    keys = list(document)
    rng.shuffle(keys)
    for key in keys:
        document[key] = document.pop(key)


def odd_elements(rng: Generator, document: dict[str, Any]) -> None:
    events = document["traceEvents"]
    for _ in range(int(rng.integers(1, 9))):
        events.insert(int(rng.integers(len(events))), choose(rng, VALUES))


def choose(rng: Generator, values: list[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


REWRITES = [swap_value, swap_everywhere, drop_keys, odd_head, reorder, odd_elements]


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.__name__)
@pytest.mark.parametrize("name", GOLDENS[:3])
@pytest.mark.parametrize("block", BLOCKS[:2])
def test_valid_json_of_any_content_keeps_every_event_or_is_refused(
    name: str, rewrite: Callable[[Generator, dict[str, Any]], None], block: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng([GOLDENS.index(name), REWRITES.index(rewrite), block])
    read = 0
    for index in range(REWRITTEN):
        document = json.loads(TEXTS[name])
        rewrite(rng, document)
        indent = (None, 1, 2)[index % 3]
        text = json.dumps(document, indent=indent).encode()
        trace = read_or_refuse(tmp_path / "rewritten.json", text)
        if trace is not None:
            read += 1
            objects = sum(isinstance(event, dict) for event in document["traceEvents"])
            assert trace.events == objects
            assert not {note.id for note in trace.quality} & {"unreadable-events", "truncated"}
    assert read > REWRITTEN // 4


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_bytes_that_hold_no_event_are_refused(tmp_path: Path, content: bytes) -> None:
    assert read_or_refuse(tmp_path / "bytes.json", content) is None


@given(st.lists(st.sampled_from([EVENT, *TOKENS]), max_size=40))
@settings(max_examples=300)
def test_fragments_of_json_give_no_event_that_was_not_there(
    tmp_path: Path, fragments: list[bytes]
) -> None:
    for content in (b"[" + b"".join(fragments), b'{"traceEvents": [' + b" ".join(fragments)):
        trace = read_or_refuse(tmp_path / "fragments.json", content)
        assert trace is None or trace.events <= content.count(b"{")


@given(st.lists(st.sampled_from([EVENT, *TOKENS]), max_size=40))
@settings(max_examples=150)
def test_whole_events_before_fragments_of_json_are_read(
    tmp_path: Path, fragments: list[bytes]
) -> None:
    """All but the one that the fragments begin at."""
    for head, between in ((b"[", b""), (b'{"traceEvents": [', b" ")):
        content = head + b",\n".join([EVENT] * 4) + b",\n" + between.join(fragments)
        trace = read_or_refuse(tmp_path / "fragments.json", content)
        assert trace is not None
        assert 3 <= trace.events <= content.count(b"{")


@pytest.mark.parametrize("name", GOLDENS[:2])
def test_a_damaged_archive_loses_no_event_without_saying_so_or_is_refused(
    name: str, tmp_path: Path
) -> None:
    import zstandard

    rng = np.random.default_rng(3)
    intact = read_or_refuse(tmp_path / "whole.json", TEXTS[name])
    assert intact is not None
    read = 0
    for whole in (gzip.compress(TEXTS[name]), zstandard.compress(TEXTS[name])):
        for mutate in (cut, flip, flip_many, delete):
            for _ in range(ROUNDS // 2):
                trace = read_or_refuse(tmp_path / "archive", mutate(rng, whole))
                if trace is None:
                    continue
                read += 1
                notes = {note.id for note in trace.quality}
                assert trace.events >= intact.events or notes & LOSSES
                assert mutate is not cut or (trace.events <= intact.events and "truncated" in notes)
    assert read > ROUNDS // 2  # an eighth of them
