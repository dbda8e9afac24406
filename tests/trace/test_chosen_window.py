"""One window stands for the run, the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from stepscope.errors import NotCapturedError
from stepscope.trace.discover import find_traces
from stepscope.trace.run_folder.windows import choose_windows, comms_of

MS = 1_000_000


def rank(run: Path, number: int, windows: Sequence[str], walls_ms: Sequence[int] = ()) -> Path:
    folder = run / f"rank-{number:05d}"
    folder.mkdir(parents=True)
    (folder / "rank.json").write_text("{}")
    for name in windows:
        (folder / name).write_bytes(b"")
    lines = [
        json.dumps({"step": step, "wall_ns": wall * MS, "window": step in (12, 13, 14)})
        for step, wall in enumerate(walls_ms)
    ]
    (folder / "steps.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


EVERY = ("trace.json.gz", "trace-step-102.json.gz", "trace-step-202.json.gz")


def test_without_other_windows_each_rank_has_its_trace(tmp_path: Path) -> None:
    for number in range(2):
        rank(tmp_path, number, ["trace.json.gz", "trace-stall.json.gz", "trace-1.json.gz"])
    assert find_traces(tmp_path) == [
        tmp_path / f"rank-0000{number}/trace.json.gz" for number in range(2)
    ]


def test_of_windows_in_typical_steps_the_latest_stands_for_the_run(tmp_path: Path) -> None:
    rank(tmp_path, 0, EVERY, [10] * 250)
    assert find_traces(tmp_path) == [tmp_path / "rank-00000/trace-step-202.json.gz"]


def test_a_window_in_unusual_steps_does_not_stand_for_the_run(tmp_path: Path) -> None:
    rank(tmp_path, 0, EVERY, [20] * 60 + [10] * 120 + [30] * 60)
    assert find_traces(tmp_path) == [tmp_path / "rank-00000/trace-step-102.json.gz"]


def test_a_window_that_a_rank_lacks_is_not_chosen(tmp_path: Path) -> None:
    rank(tmp_path, 0, EVERY, [10] * 250)
    rank(tmp_path, 1, EVERY[:2], [10] * 250)
    assert [trace.name for trace in choose_windows(sorted(tmp_path.iterdir()))] == [EVERY[1]] * 2


def test_ranks_without_a_common_window_show_their_first(tmp_path: Path) -> None:
    rank(tmp_path, 0, EVERY[:1])
    rank(tmp_path, 1, EVERY[1:])
    assert [trace.name for trace in choose_windows(sorted(tmp_path.iterdir()))] == [
        EVERY[0],
        EVERY[1],
    ]


def test_a_folder_of_one_rank_stands_for_that_rank(tmp_path: Path) -> None:
    folder = rank(tmp_path, 0, [*EVERY, "trace-stall.json.gz"], [10] * 250)
    assert find_traces(folder) == [folder / EVERY[2]]


def test_without_steps_the_latest_stands_for_the_run(tmp_path: Path) -> None:
    rank(tmp_path, 0, EVERY)
    assert find_traces(tmp_path) == [tmp_path / "rank-00000" / EVERY[2]]


def test_a_regular_window_has_its_own_list_of_collectives() -> None:
    assert comms_of(Path("rank-00000/trace-step-102.json.gz")) == "comms-step-102.jsonl"
    assert comms_of(Path("rank-00000/trace.json.gz")) == "comms.jsonl"


# Files that stepscope itself writes into a run's folder are not taken for traces.


def test_a_trial_without_a_trace_says_that_only_steps_were_captured(tmp_path: Path) -> None:
    rank = tmp_path / "rank-00000"
    rank.mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"schema": 1, "command": ["x"]}))
    (tmp_path / "losses.json").write_text("[]")
    for name in ("rank.json", "script.json", "trial.json"):
        (rank / name).write_text("{}")
    with pytest.raises(NotCapturedError, match="holds no trace"):
        find_traces(tmp_path)
