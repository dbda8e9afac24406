"""Clocks of hosts that are seconds apart and drift are aligned, and upset nothing else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from jobs_on_hosts import capture, codes, explain, run
from lab import Lab, why_no_shifted_clock

ENV = {"STEPS": "105", "WORK_MS": "10"}


@pytest.fixture
def shifted(lab: Lab) -> Lab:
    """node1's clock is 3 s ahead and gains 60 µs a second."""
    reason = why_no_shifted_clock()
    if reason:
        pytest.skip(reason)
    lab.shift_clock("node1", 3_000, drift_ppm=60)
    return lab


def clock_file(folder: Path, rank: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"rank-{rank:05d}" / "clock.json").read_text())
    return content


def test_clocks_three_seconds_apart_in_a_shared_folder(shifted: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    expected_ns = 3e9 + 60e-6 * time.monotonic_ns()  # it drifts since the machine's start
    assert codes(run(shifted, capture(folder), ENV)) == {"node0": 0, "node1": 0}
    answer = explain(folder)

    clock = answer["clock"]
    assert clock["aligned"]
    assert abs(clock["offset_ns"]["1"] - expected_ns) < 60e6  # up to a quarter of an hour later
    assert clock["error_ns"]["1"] < 2e6
    first, second = clock["hosts"]
    assert (first["host"], first["ranks"], first["offset_ns"]) == ("node0", [0], 0)
    assert (second["host"], second["ranks"]) == ("node1", [1])
    assert abs(second["offset_ns"] - expected_ns) < 60e6
    assert second["meetings"] >= 3  # before and after the window, and at step 100
    assert second["drift_ppm"] == pytest.approx(60, abs=40)
    assert second["was_set"] == []

    meetings = [(sync["label"], sync["step"]) for sync in clock_file(folder, 0)["syncs"]]
    assert ("run", 100) in meetings
    for row in answer["collectives"]:
        if row["wait_ns"] is not None:
            assert row["wait_ns"] / row["count"] < 1e9  # not the clocks' three seconds
            assert row["wait_error_ns"] > 0

    run_json = json.loads((folder / "run.json").read_text())
    took = {host["host"]: host["ended_unix"] - host["started_unix"] for host in run_json["hosts"]}
    walls = [rank["account"]["wall_ms"] / 1e3 for rank in answer["run"]["ranks"]]
    assert walls == pytest.approx([max(took.values())] * 2, abs=2)  # not three seconds more
    for rank in answer["run"]["ranks"]:
        parts = {part["id"]: part["ms"] for part in rank["account"]["parts"]}
        assert parts["outside"] < 1_000
        assert not [note for note in rank["account"]["notes"] if "clock" in note]
    found = answer["stragglers"]
    assert not [one for one in found["ranks"] if (one["excess_ms"] or 0) > 1_000]
