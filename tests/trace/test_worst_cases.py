"""Files made to be slow: time and memory stay in proportion to the file's size."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from kineto_events import op

from stepscope import StepscopeError, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZE = 2_000_000  # bytes, about
SECONDS = 8.0  # of processor time; most take far less than one
EVENT = json.dumps(op("aten::mm", 10, 5, **{"External id": 1, "Input Dims": [[1, 2], [3]]}))
COUNT = SIZE // len(EVENT)


def of(event: str, count: int = COUNT) -> str:
    return '{"schemaVersion": 1, "traceEvents": [' + ", ".join([event] * count) + "]}"


def with_args(extra: str) -> str:
    return EVENT[:-2] + f", {extra}}}}}"


def between(middle: str) -> str:
    return of(f"{EVENT}, {middle}, {EVENT}", 1)


CASES: dict[str, Callable[[], str]] = {
    "every event has a bare NaN": lambda: of(with_args('"x": NaN')),
    "every event has a wrong type": lambda: of(EVENT.replace('"pid": 1', '"pid": null')),
    "every event has unescaped quotes": lambda: of(EVENT.replace("aten::mm", 'say "hi"')),
    "every event has a stray backslash": lambda: of(EVENT.replace("aten", "C:\\x")),
    "every event lacks a colon": lambda: of(EVENT.replace('"ts":', '"ts"')),
    "every event lacks its last brace": lambda: of(EVENT[:-1]),
    "every event lacks a quote": lambda: of(EVENT.replace('"name": "', '"name": ')),
    "every event opens a list that never ends": lambda: of(with_args('"l": [{"name": 1}')[:-2]),
    "every event has lists of objects": lambda: of(with_args('"l": [{"name": 1}, {"name": 2}]')),
    "every event has lists of objects and a NaN": lambda: of(
        with_args('"l": [{"name": 1}, {"name": 2}], "x": NaN')
    ),
    "every event is on a lane of its own": lambda: of(
        ", ".join(EVENT.replace('"tid": 1', f'"tid": {i}') for i in range(COUNT)), 1
    ),
    "one long string": lambda: between(with_args(f'"s": "{"x" * SIZE}"')),
    "one long string of braces": lambda: between(with_args(f'"s": "{"}, {" * (SIZE // 4)}"')),
    "one long string of escapes": lambda: between(with_args('"s": "' + "\\\\" * SIZE + '"')),
    "one long string without an end": lambda: between(with_args('"s": "' + "x" * SIZE)),
    "one long number": lambda: between(EVENT.replace("10", "9" * SIZE, 1)),
    "one event nested deeper than any limit": lambda: between(
        with_args('"deep": ' + "[" * 100_000 + "]" * 100_000)
    ),
    "brackets that only open": lambda: between(with_args('"deep": ' + "[" * SIZE)),
    "a bare list of brackets": lambda: "[" * SIZE,
    "objects that only open": lambda: '{"a":' * (SIZE // 5),
    "names that never close": lambda: between('{"ph": "X", ' + '"name": "x' * (SIZE // 10) + "}"),
    "the key of the events everywhere in the head": lambda: (
        '{"a": [' + '{"traceEvents": []}, ' * (SIZE // 21) + '1], "traceEvents": [' + EVENT + "]}"
    ),
    "a quote too many in the head": lambda: '{"a": "b"c", ' + of(EVENT)[1:],
    "lists behind the events": lambda: (
        of(EVENT, 2)[:-1] + ', "t": [' + ", ".join(['{"a": [{"b": 1}]}'] * (SIZE // 19)) + "]}"
    ),
    "empty objects": lambda: '{"traceEvents": [' + EVENT + ", {}" * (SIZE // 4) + "]}",
    "numbers for events": lambda: '{"traceEvents": [' + EVENT + ", 5" * (SIZE // 12) + "]}",
    "blanks before": lambda: " " * SIZE + of(EVENT, 1),
    "blanks between": lambda: between(" " * SIZE + EVENT),
    "zeros behind": lambda: of(EVENT, 3) + "\0" * SIZE,
}


@pytest.mark.few(12)
@pytest.mark.parametrize("case", CASES)
def test_time_and_memory_stay_in_proportion(case: str, tmp_path: Path) -> None:
    path = tmp_path / "worst.json"
    path.write_text(CASES[case]())
    began = time.process_time()
    answer, message = None, ""
    try:
        answer = read_trace(path, cache=False)
    except StepscopeError as error:
        message = str(error)
    assert answer or str(path) in message
    assert time.process_time() - began < SECONDS
    kept = case.startswith("every") and "lacks" not in case and "never ends" not in case
    if kept:
        assert answer is not None
        assert answer.events >= COUNT


def test_a_long_file_takes_no_more_memory_than_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "long.json"
    path.write_text(of(EVENT, 12 * COUNT))
    read_trace(path, cache=False)
    tracemalloc.start()
    try:
        trace = read_trace(path, cache=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert trace.events == 12 * COUNT
    columns = sum(getattr(trace.host, column).nbytes for column in trace.host.__struct_fields__)
    assert peak < 1.4 * columns + (8 << 20)  # and not the text, which is longer
