"""Steps measured outside the window, and which rank's are the whole job's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from measured import read_measured_steps
from stepscope.trace.measured_steps import slowest_in_step


def run_of(folder: Path, *ranks: list[float], window: tuple[int, ...] = ()) -> list[Path]:
    """A run folder whose ranks took so many milliseconds in each step; step 0 is not plain."""
    traces = []
    for rank, steps in enumerate(ranks):
        home = folder / f"rank-{rank:05d}"
        home.mkdir(parents=True)
        rows = [
            {"step": i, "wall_ns": round(ms * 1e6), "first": i == 0, "window": i in window}
            for i, ms in enumerate(steps)
        ]
        (home / "steps.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        traces.append(home / "trace.json.gz")
    return traces


def test_ranks_in_step_share_the_slowest_ranks_step(tmp_path: Path) -> None:
    # Both spend 240 ms on steps 1 to 6, one evenly and one by turns: medians 40 and 50.
    even = [900.0, 40, 40, 40, 40, 40, 40]
    turns = [300.0, 50, 10, 50, 50, 20, 60]
    traces = run_of(tmp_path / "run", even, turns)
    assert slowest_in_step(traces) == traces[1]
    truths = [read_measured_steps(trace, traces[1]) for trace in traces]
    assert [truth.step_ns for truth in truths if truth] == [50_000_000, 50_000_000]
    alone = read_measured_steps(traces[0])
    assert alone is not None
    assert alone.step_ns == 40_000_000


@pytest.mark.parametrize(
    ("why", "other"),
    [
        ("it goes its own way", [5.0] * 40),
        ("it measured nothing", []),
        ("it has the first step only", [40.0]),
    ],
)
def test_ranks_that_are_not_in_step_keep_their_own(
    tmp_path: Path, why: str, other: list[float]
) -> None:
    assert slowest_in_step(run_of(tmp_path / why, [40.0] * 40, other)) is None


def test_a_rank_alone_and_two_runs_are_no_job(tmp_path: Path) -> None:
    first, second = (run_of(tmp_path / name, [40.0] * 9) for name in ("a", "b"))
    assert slowest_in_step(first) is None
    assert slowest_in_step([*first, *second]) is None


def test_the_windows_steps_tell_who_is_in_step_but_are_not_the_step(tmp_path: Path) -> None:
    traces = run_of(tmp_path / "run", [9.0, 40, 70, 70, 41], [9.0, 42, 70, 70, 39], window=(2, 3))
    assert slowest_in_step(traces) == traces[0]  # medians 40.5 and 40.5: the first
    truth = read_measured_steps(traces[1], traces[0])
    assert truth is not None
    assert truth.step_ns == 40_500_000
