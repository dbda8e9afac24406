"""The shipped constants of convolutions against the times that they were fitted to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from fit_convolutions import (
    MEASURED,
    Errors,
    errors,
    fit,
    measured_ns,
    parts_of,
    read_shapes,
    shipped_ns,
)

if TYPE_CHECKING:
    from pathlib import Path

DEVICE, ROWS = read_shapes(MEASURED)
CASES = [(dtype, name) for dtype in ("tf32", "bf16") for name in ("forward", "backward")]


def errors_of(dtype: str, name: str, part: str) -> Errors:
    measured = measured_ns(ROWS, dtype, name)
    mine = parts_of(ROWS, measured, name)[part]
    return errors(shipped_ns(DEVICE, ROWS, dtype, name)[mine], measured[mine])


@pytest.mark.parametrize(("dtype", "name"), CASES)
def test_well_known_shapes_are_within_a_quarter(dtype: str, name: str) -> None:
    found = errors_of(dtype, name, "well known")
    assert found.median < 0.08
    assert found.within_quarter > 0.88


@pytest.mark.parametrize(("dtype", "name"), CASES)
def test_random_shapes_that_were_not_fitted(dtype: str, name: str) -> None:
    found = errors_of(dtype, name, "held out")
    assert found.median < 0.14
    assert found.within_quarter > 0.70
    assert errors_of(dtype, name, "held out, long").median < 0.12


def test_the_fit_finds_the_shipped_constants_again() -> None:
    measured = measured_ns(ROWS, "bf16", "forward")
    fitted = parts_of(ROWS, measured, "forward")["fitted"]
    rows = [row for row, mine in zip(ROWS, fitted, strict=True) if mine]
    factors = fit(DEVICE, rows, "bf16", "forward")
    assert factors.product == pytest.approx(1.28, rel=0.02)
    assert factors.start == pytest.approx(8490, rel=0.05)


def test_rows_are_read_as_measured_too(tmp_path: Path) -> None:
    shape = {"batch": 8, "inputs": 16, "outputs": 32, "side": 7, "kernel": [3, 3], "stride": 2}
    times = {"forward": 10_000, "backward": 30_000}
    rows = [{**shape, "way": way, **times} for way in ("fp32", "tf32", "bf16")]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"device": "NVIDIA H200", "rows": rows}))
    device, [found] = read_shapes(path)
    assert device == "NVIDIA H200"
    assert (found.shape.read_points, found.shape.written_points) == (49, 16)
    assert found.times_ns["tf32"] == {"forward": 10_000, "backward": 30_000}
