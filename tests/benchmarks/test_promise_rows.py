"""Rows of promised against measured, with numbers worked out by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from promise_rows import rows_of, summary_of, table_lines, write_docs

PROMISE = {
    "baseline_ms": 100.0,
    "predicted_ms": 55.0,
    "low_ms": 45.0,
    "high_ms": 60.0,
    "peak_bytes": 1_030,
    "refused": [],
}
RESULTS = {
    "llama": {
        "promises": {
            "modelled": {"precision=bf16": PROMISE, "batch=x2": {"refused": "no"}},
            "probed": {"precision=bf16": {**PROMISE, "predicted_ms": 120.0, "high_ms": 130.0}},
        },
        "measured": {
            "": {"step_ms": 100.0},
            "precision=bf16": {"step_ms": 50.0, "peak_bytes": 1_000},
            "batch=x2": {"step_ms": 190.0},
            "checkpoint=blocks": {"failure": "out of memory"},
        },
    }
}


def test_errors_intervals_and_signs() -> None:
    modelled, probed = rows_of(RESULTS)
    assert (modelled["error"], modelled["peak_error"]) == pytest.approx((0.1, 0.03))
    assert modelled["inside"]
    assert modelled["sign"] is True
    assert probed["error"] == pytest.approx(1.4)
    assert probed["sign"] is False


def test_the_summary_counts_only_what_was_promised_and_measured() -> None:
    summary = summary_of([row for row in rows_of(RESULTS) if row["way"] == "modelled"])
    assert summary is not None
    assert (summary["cases"], summary["peaks"]) == (1, 1)
    assert summary_of([]) is None


def test_the_page_keeps_what_is_around_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- library promises: begin -->\nold\n<!-- library promises: end -->\nafter\n"
    )
    write_docs(page, RESULTS)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert table_lines(RESULTS)[0] in text
