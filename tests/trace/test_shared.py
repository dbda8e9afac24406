"""Every real recording at hand, against what plain json and decimal say about the same file."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope import read_trace
from stepscope.records.trace import DeviceEvents, HostEvents, Trace

SAMPLE = 500


@pytest.fixture(scope="module")
def golden_names() -> list[str]:
    return ["cpu_step", "cpu_stack_memory", "cuda_step", "cuda_graph"]


def plain(path: Path) -> dict[str, Any]:
    """The file by the standard library, numbers with decimals left as text."""
    found = json.loads(gzip.decompress(path.read_bytes()), parse_float=str)
    return found if isinstance(found, dict) else {"traceEvents": found}


def to_ns(value: Any) -> int:
    return round(Decimal(value) * 1000)


def rows_of(trace: Trace, table: HostEvents | DeviceEvents) -> Counter[tuple[str, int, int]]:
    names = (trace.strings[code] for code in table.name.tolist())
    return Counter(zip(names, table.start_ns.tolist(), table.dur_ns.tolist(), strict=True))


def check(path: Path) -> None:
    document, trace = plain(path), read_trace(path, cache=False)
    events = document["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and e.get("cat") != "Trace"]
    left_out = sum(note.count or 0 for note in trace.quality if note.id == "malformed")
    assert trace.events == len(events)
    assert len(trace.host) + len(trace.device) == len(spans) - left_out
    assert {note.id for note in trace.quality} <= {"unlinked", "malformed"}
    base = int(document.get("baseTimeNanoseconds", 0))
    found = rows_of(trace, trace.host) + rows_of(trace, trace.device)
    rng = np.random.default_rng(0)
    chosen = [spans[i] for i in rng.permutation(len(spans))[:SAMPLE]]
    expected = Counter(
        (e["name"], base + to_ns(e["ts"]), to_ns(e["dur"])) for e in chosen if to_ns(e["dur"]) >= 0
    )
    assert expected
    assert not expected - found


@pytest.mark.few(10)
def test_a_shared_trace_has_the_spans_and_times_that_json_and_decimal_see(
    unlike_trace: Path,
) -> None:
    check(unlike_trace)


def test_golden_traces_have_the_spans_and_times_that_json_and_decimal_see(
    golden: Path, golden_names: list[str]
) -> None:
    for name in golden_names:
        check(golden / f"{name}.json.gz")


@pytest.mark.few(10)
def test_a_shared_trace_cut_and_damaged_loses_little(unlike_trace: Path, tmp_path: Path) -> None:
    text = gzip.decompress(unlike_trace.read_bytes())[: 3 << 20]
    at = text.rindex(b'"ph"', 0, len(text) * 3 // 4)
    damaged = tmp_path / "damaged.json"
    damaged.write_bytes(text[:at] + text[at:].replace(b":", b" ", 1))
    whole = tmp_path / "whole.json"
    whole.write_bytes(text)
    expected, found = read_trace(whole, cache=False), read_trace(damaged, cache=False)
    assert expected.events - 2 <= found.events < expected.events
    [note] = [note for note in found.quality if note.id == "unreadable-events"]
    assert note.count == 1
    assert note.byte_offset is not None
    assert 0 <= at - note.byte_offset < 2000
