"""The model of the scan's cost against what was measured on an H200."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from stepscope.records.scan_costs import gpu_layer_us, gpu_scan_pays, is_fused

TABLE = Path(__file__).parents[2] / "benchmarks" / "measured" / "scan_h200.json"
FEATURES = 8  # scan_table.py's
LOSES = 0.95  # times as fast

H200_MULTIPROCESSORS = 132


def shape(cell: dict[str, Any]) -> tuple[int, int, int, int]:
    return cell["steps"], cell["batch"], cell["size"], FEATURES


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(TABLE.read_text())
    assert len(found) > 100
    return found


def compared(cells: list[dict[str, Any]]) -> list[tuple[bool, float, float, Any]]:
    """Whether the model promises a gain; and how many times as fast backward and the step were."""
    rows = []
    for cell in cells:
        ms = cell["ms"]
        if isinstance(ms.get("cudnn"), float):  # cuDNN takes 65535 steps
            pays = gpu_scan_pays(1e3 * ms["cudnn"], shape(cell), H200_MULTIPROCESSORS)
            step = ms["cudnn step"] / ms["scan step"]
            rows.append((pays, ms["cudnn"] / ms["scan"], step, shape(cell)))
    return rows


def test_no_gain_is_promised_where_the_scan_loses(cells: list[dict[str, Any]]) -> None:
    rows = compared(cells)
    assert not [row for row in rows if row[0] and min(row[1], row[2]) < LOSES]
    assert not [row for row in rows if row[0] and row[3][1] >= 16 and row[3][2] == 128]


def test_large_gains_are_not_missed(cells: list[dict[str, Any]]) -> None:
    assert not [row for row in compared(cells) if not row[0] and min(row[1], row[2]) > 1.2]


def test_backward_times_are_off_by_less_than_a_fifth_in_the_mean(
    cells: list[dict[str, Any]],
) -> None:
    wrong = [
        abs(math.log(gpu_layer_us(*shape(cell), H200_MULTIPROCESSORS) / 1e3 / cell["ms"]["scan"]))
        for cell in cells
    ]
    assert math.exp(statistics.mean(wrong)) < 1.2
    assert sum(one > math.log(2) for one in wrong) <= 1  # T = 1024, B = 16, H = 128


def test_a_layer_is_fused_where_registers_hold_it() -> None:
    assert is_fused(20, 8)
    assert is_fused(32, 32)
    assert not is_fused(33, 8)
    assert not is_fused(20, 33)
