"""Lines reach the disk whole and in order, whatever happens around them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from stepscope.measure.harmless import problems
from stepscope.measure.writer import FLUSH_S, LineWriter


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_on_disk_before_the_end(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "a.jsonl")
    writer.put({"n": 1})
    time.sleep(4 * FLUSH_S)
    assert lines_of(tmp_path / "a.jsonl") == [{"n": 1}]
    writer.put({"n": 2})
    writer.close()
    assert lines_of(tmp_path / "a.jsonl") == [{"n": 1}, {"n": 2}]


def test_a_row_that_is_not_ready_holds_back_those_behind_it(tmp_path: Path) -> None:
    ready = False
    writer = LineWriter(tmp_path / "a.jsonl", lambda row: row if ready or row["n"] != 1 else None)
    for n in (0, 1, 2):
        writer.put({"n": n})
    time.sleep(4 * FLUSH_S)
    assert lines_of(tmp_path / "a.jsonl") == [{"n": 0}]
    ready = True
    writer.close()
    assert [row["n"] for row in lines_of(tmp_path / "a.jsonl")] == [0, 1, 2]


def test_a_disk_that_refuses_is_noted_and_the_training_goes_on(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "no-such-folder" / "a.jsonl")
    writer.put({"n": 1})
    writer.close()
    assert any("a.jsonl" in problem for problem in problems())
