"""The fuse table: its order, its report, and a run of it with small shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuse_cells import FuseCell, plan
from fuse_models import CASES
from fuse_report import markdown, plot
from fuse_ways import WAYS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def cell(case: str, way: str, models: int, ms: float, **more: Any) -> dict[str, Any]:
    facts = {"ms_a_model_step": ms, "control_ms": 10.0, "speed_up": 10.0 / ms}
    return {"case": case, "dtype": "bf16", "way": way, "models": models, **facts, **more}


def test_the_first_cells_are_resnet_with_the_most_models_in_bf16() -> None:
    cells = plan(list(CASES), ["bf16", "fp32"], [1, 8, 32], [*WAYS, "processes"])
    assert len(set(cells)) == len(cells)
    first = cells[: len(WAYS) - 1]
    assert {(one.case, one.dtype) for one in first} == {("resnet-18", "bf16")}
    assert {one.models for one in first} == {1, 32}  # serial ways train one model
    goal = ["fused+compile+graph", "serial compiled+graphed", "fused+graph"]
    assert [one.way for one in first[:3]] == goal
    assert {one.case for one in cells} == set(CASES)
    assert FuseCell("dcgan", "fp32", "fused", 8) in cells


def test_the_table_compares_with_the_best_serial_way_and_tells_the_mean() -> None:
    results = [
        cell("resnet-18", "serial eager", 1, 10.0, peak_bytes_a_model=5),
        cell("resnet-18", "serial graphed", 1, 4.0, peak_bytes_a_model=5),
        cell("resnet-18", "fused", 8, 2.0, peak_bytes_a_model=3_000_000),
        cell("resnet-18", "fused+graph", 32, 1.0, peak_bytes_a_model=2_000_000),
        cell("dcgan", "fused", 8, 2.5, peak_bytes_a_model=None),
        {"case": "dcgan", "dtype": "bf16", "way": "fused", "models": 32, "error": "out of memory"},
    ]
    table = markdown(results, "A GPU")
    row = next(line for line in table.splitlines() if line.startswith("| resnet-18"))
    assert row == ("| resnet-18 | 10.00 | 4.00 | - | - | - | - | 1.00 | 32 | 10.0x | 4.0x | 2 |")
    assert "Geometric mean of the speed-ups: 6.3x" in table  # of 10 and 4
    assert "| dcgan | 4.0x | - |" in table
    picture = plot(results)
    assert picture.startswith("<svg")
    assert picture.count('stroke-width="2"') == 2


@pytest.mark.slow
def test_a_small_run_checks_measures_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    common = [sys.executable, str(BENCHMARKS / "fuse_table.py"), "--tiny", "--device", "cpu"]
    common += ["--only", "transformer-lm", "--dtypes", "fp32", "--models", "2"]
    checked = subprocess.run([*common, "--check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert [line[:4] for line in checked.stdout.splitlines()] == ["pass", "pass"]

    common += ["--timed", "0.05", "--save", str(file)]
    for ways, count in (("serial eager,fused", 2), ("serial eager,fused,streams,processes", 4)):
        ran = subprocess.run([*common, "--ways", ways], capture_output=True, text=True, check=True)
        cells = json.loads(file.read_text())["cells"]
        assert len(cells) == count
        assert all(one["ms_a_model_step"] > 0 for one in cells)
        assert "| transformer-lm |" in ran.stdout
    assert cells[:2] == json.loads(file.read_text())["cells"][:2]


def test_an_unknown_training_is_refused_in_one_line() -> None:
    command = [sys.executable, str(BENCHMARKS / "fuse_table.py"), "--only", "resnet-19", "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("unknown: resnet-19; there are resnet-18, ")
