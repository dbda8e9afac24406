"""The programs around save_memory: rows that go on where they ended, the picture, the verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import save_memory_lossy
import save_memory_residuals
import save_memory_rows

REPORT = Path(save_memory_rows.__file__).with_name("save_memory_report.py")


def test_rows_are_saved_at_once_and_measured_once(tmp_path: Path) -> None:
    path, asked = tmp_path / "rows.json", list[int]()

    def measure(cell: dict[str, Any]) -> dict[str, Any]:
        asked.append(cell["number"])
        if cell["number"] == 1 and len(asked) < 4:
            raise ValueError("not yet")
        return {"twice": 2 * cell["number"]}

    cells = [{"number": number} for number in range(3)]
    rows = save_memory_rows.measure_rows(cells, measure, path=path, seconds=60)
    assert [row.get("twice") for row in rows] == [0, None, 4]
    assert rows[1]["error"] == "ValueError: not yet"
    again = save_memory_rows.measure_rows(cells, measure, path=path, seconds=60)
    assert asked == [0, 1, 2, 1]
    assert {row["number"]: row["twice"] for row in again} == {0: 0, 1: 2, 2: 4}
    assert save_memory_rows.saved_rows(path) == again
    assert save_memory_rows.measure_rows(cells, measure, path=None, seconds=-1) == []


def row(way: str, ms: float, peak: int | None, kept: int | None) -> dict[str, Any]:
    return {"model": "net", "way": way, "ms": ms, "peak_bytes": peak, "kept_bytes": kept}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_one_command_prints_the_table_and_draws_the_picture(tmp_path: Path, on_gpu: bool) -> None:
    peaks = (4_000_000_000, 2_000_000_000) if on_gpu else (None, None)
    rows = [row("eager", 10.0, peaks[0], 800), row("ours 5%", 10.4, peaks[1], 400)]
    rows.append({"model": "net", "way": "compile", "error": "RuntimeError: no compiler"})
    saved, picture = tmp_path / "rows.json", tmp_path / "picture.svg"
    saved.write_text(json.dumps(rows))
    command = [sys.executable, str(REPORT), str(saved), "--svg", str(picture)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "+4.0%" in printed
    assert "2.00x" in printed
    assert "RuntimeError: no compiler" in printed
    titles = [e.text for e in ElementTree.parse(picture).iter() if e.tag.endswith("title")]
    kind = "peak" if on_gpu else "kept"
    assert f"plan 5%: step 1.040, {kind} 0.500 of eager's" in titles
    assert len(titles) == 2


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    command = [sys.executable, str(REPORT), str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "save_memory_table.py --save writes it" in done.stderr


def steps(*counts: int | None) -> dict[int, dict[str, Any]]:
    return {seed: {"steps": count} for seed, count in enumerate(counts)}


@pytest.mark.parametrize(
    ("lossy", "within"),
    [
        (steps(20, 22, 24), True),
        (steps(20, 26, 26), True),  # the mean is the slowest plain seed's
        (steps(20, 28, 27), False),
        (steps(20, None, 20), False),
        (steps(20), None),
    ],
)
def test_an_encoding_is_within_the_spread_of_plain_seeds(lossy: Any, within: bool | None) -> None:
    assert save_memory_lossy.is_within(steps(20, 22, 24), lossy) is within


def test_plain_training_that_misses_its_target_decides_nothing() -> None:
    assert save_memory_lossy.is_within(steps(20, None, None), steps(20, 20, 20)) is None


def test_the_tails_of_the_residuals_are_left_out() -> None:
    values = [1.0 + number / 100 for number in range(41)]
    assert save_memory_residuals.quantiles(values) == (1.02, 1.38)
    assert save_memory_residuals.quantiles([1.1]) == (1.1, 1.1)


@pytest.mark.slow
def test_a_promise_is_compared_with_what_happens(tmp_path: Path) -> None:
    """One real row, on this CPU."""
    path = tmp_path / "residuals.json"
    program = str(Path(save_memory_residuals.__file__))
    command = [sys.executable, program, "--tiny", "--models", "seq2seq", "--save", str(path)]
    subprocess.run([*command, "--seconds", "0.001"], capture_output=True, check=True)
    (measured,) = json.loads(path.read_text())
    assert "error" not in measured
    assert ("nothing" in measured) != ("step_residual" in measured)
