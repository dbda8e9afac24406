"""The scan table's report: gains, and a picture with a square for each shape."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from scan_report import backward_gain, heat_map, markdown, step_gain


def cell(steps: int, batch: int, size: int, **ms: Any) -> dict[str, Any]:
    return {"steps": steps, "batch": batch, "size": size, "ms": ms}


CELLS = [
    cell(1024, 16, 20, cudnn=0.7, scan=0.35, **{"cudnn step": 1.0, "scan step": 0.65}),
    cell(4096, 16, 20, cudnn=2.0, scan="OutOfMemoryError: no room"),
    cell(1024, 1, 64, cudnn=0.7, scan=1.4),
]


def test_gains_are_times_as_fast_and_unknown_where_one_failed() -> None:
    assert backward_gain(CELLS[0]) == 2.0
    assert step_gain(CELLS[0]) == pytest.approx(1 / 0.65)
    assert backward_gain(CELLS[1]) is None
    assert step_gain(CELLS[2]) is None
    rows = markdown(CELLS).splitlines()[2:]
    assert rows[0].startswith("| 1 | 64 | 1024 | 0.7 | 1.4 | 0.5x |")
    assert "| 2 | - | - |" in rows[2]


def test_the_picture_has_a_square_for_each_shape_that_was_measured() -> None:
    refused = cell(65536, 1, 64, scan=1.2, cudnn="RuntimeError: CUDNN_STATUS_NOT_SUPPORTED")
    root = ElementTree.fromstring(heat_map([*CELLS, refused]))
    squares = [one for one in root.iter() if one.tag.endswith("rect")][1:]
    colours = [one.get("fill") for one in squares if one.get("fill") != "none"]
    dashed = [one for one in squares if one.get("stroke-dasharray")]
    assert len(colours) + len(dashed) == len(squares)
    reds, greens = zip(*(map(int, one[4:-1].split(",")[:2]) for one in colours), strict=True)
    assert reds[0] > greens[0]  # batch 1 comes first: slower
    assert "only" in [one.text for one in root.iter()]
    assert greens[2] > reds[2]
    assert len(colours) == 3
