"""Attempts of a job that grows or shrinks when it is restarted."""

from __future__ import annotations

from pathlib import Path

from live_runs import BEGAN_NS, make_rows, write_rank, write_run, write_steps
from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.run_times import read_run_times
from stepscope.trace.run_folder.step_files import read_step_columns

SECOND_NS = 1_000_000_000


def train(run: Path, name: str, began_s: int, steps: int) -> None:
    """A process that begins its steps of 100 ms one second after it began."""
    began_ns = BEGAN_NS + began_s * SECOND_NS
    write_rank(run / name, rank=int(name[5:10]), start_up={"began_unix_ns": began_ns})
    write_steps(run / name, make_rows([100.0] * steps, began_ns=began_ns + SECOND_NS))


def attempts(run: Path) -> dict[str, tuple[int, float]]:
    """By folder: the attempt, and when it began in seconds."""
    write_run(run, code=0, ended_s=BEGAN_NS / 1e9 + 100)
    found = {}
    for folder in sorted(run.glob("rank-*")):
        times = read_run_times(folder, read_step_columns(folder, Oddities("steps.jsonl")))
        assert times is not None
        found[folder.name] = times.attempt, (times.began_ns - BEGAN_NS) / SECOND_NS
    return found


def test_a_rank_that_joins_belongs_to_the_attempt_it_joined(tmp_path: Path) -> None:
    for name in ("rank-00000", "rank-00001"):
        train(tmp_path, name, 1, 20)  # until second 4
    for name in ("rank-00000.2", "rank-00001.2", "rank-00002"):
        train(tmp_path, name, 10, 20)  # until second 13
    for name in ("rank-00000.3", "rank-00001.3", "rank-00002.2"):
        train(tmp_path, name, 20, 20)
    assert attempts(tmp_path) == {
        "rank-00000": (1, 0),
        "rank-00001": (1, 0),
        "rank-00000.2": (2, 10),
        "rank-00001.2": (2, 10),
        "rank-00002": (2, 10),
        "rank-00000.3": (3, 20),
        "rank-00001.3": (3, 20),
        "rank-00002.2": (3, 20),
    }


def test_a_rank_that_was_lost_belongs_to_the_first_attempt(tmp_path: Path) -> None:
    for name in ("rank-00000", "rank-00001"):
        train(tmp_path, name, 1, 20)
    train(tmp_path, "rank-00000.2", 10, 20)
    found = attempts(tmp_path)
    assert (found["rank-00001"], found["rank-00000.2"]) == ((1, 0), (2, 10))


def test_ranks_that_train_at_the_same_time_are_one_attempt(tmp_path: Path) -> None:
    for name in ("rank-00000", "rank-00000.2", "rank-00001"):
        train(tmp_path, name, 1, 20)
    assert {attempt for attempt, _ in attempts(tmp_path).values()} == {1}
