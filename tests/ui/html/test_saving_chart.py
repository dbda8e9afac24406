"""The report's picture of what save_memory keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import stepscope
from stepscope.records.memory import SavingTimeline
from stepscope.ui.html.panes.memory import draw_saving, drawn_actions

LINE = {
    "forward_points": 2,
    "before_bytes": {"keep": [1000, 2000, 2000, 0], "recompute": [500, 3000, 1000, 0]},
    "after_bytes": [1000, 2000, 2500, 0],
}


def test_what_stays_is_at_the_bottom() -> None:
    line = SavingTimeline(before_bytes={"recompute": [1, 2], "keep": [3, 4], "encode": [0, 0]})
    assert drawn_actions(line) == ["keep", "recompute"]


def test_lines_of_different_lengths_are_not_drawn() -> None:
    line = SavingTimeline(forward_points=1, before_bytes={"keep": [1]}, after_bytes=[1, 2])
    assert draw_saving(line) == draw_saving(None) == ""


def test_the_report_shows_both(golden: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(golden / "h200-resnet18", run)
    saving = {
        "schema": 1,
        "target": "5%",
        "saved_bytes_before": 5000,
        "saved_bytes": 2000,
        "peak_bytes_before": 5000,
        "peak_bytes": 2500,
        "extra_ns": 1_000_000,
        "step_ns_before": 100_000_000,
        "step_ns": 101_000_000,
        "actions": [{"action": "recompute", "values": 7, "before_bytes": 3000, "cost_ns": 900_000}],
        "values": [{"value": "4x4 <float>", "module": "relu", "size_bytes": 64}],
        "timeline": LINE,
        "notes": ["a note"],
    }
    (run / "rank-00000" / "memory-plan.json").write_text(json.dumps(saving))
    explanation = stepscope.explain(run)
    page = stepscope.write_report(explanation, tmp_path / "report.html").read_text()
    assert "save_memory: 2.00 kB saved for backward instead of 5.00 kB" in page
    assert "5.00 kB without" in page
    assert "2.50 kB with" in page
    assert "7 values" in page
    assert "4x4 &lt;float&gt;" in page
