"""When a rank's part of the command began and ended, on the clock of its own host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from explain.whole_run.columns import columns
from live_runs import BEGAN_NS, make_rows, write_rank, write_run, write_steps
from stepscope.records.rank import StepColumns
from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.run_times import CommandTimes, read_command_times, read_run_times
from stepscope.trace.run_folder.step_files import read_step_columns

S = 1_000_000_000
START_S = 1_789_000_000


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def sync(step: int, at_s: float, half_ns: int = 0) -> dict[str, Any]:
    at = round((START_S + at_s) * S)
    return {"label": "run", "step": step, "rounds": [[at - half_ns, at + half_ns]] * 3}


def make_run(folder: Path, **run: Any) -> Path:
    """Rank 0 on node0; rank 1 on node1, 3 s ahead at step 100 and 3.2 s at step 200."""
    process = {"pid": 1, "host": "node0"}
    times = {"started_unix": START_S, "ended_unix": START_S + 60}
    write(folder / "run.json", {**times, "process": process, **run})
    for rank, syncs in enumerate(
        ([sync(100, 10), sync(200, 1010)], [sync(100, 13, 9), sync(200, 1013.2, 9)])
    ):
        place = folder / f"rank-{rank:05d}"
        write(place / "rank.json", {"host": f"node{rank}"})
        write(place / "clock.json", {"syncs": syncs})
    return folder


def steps_until(end_s: float) -> StepColumns:
    steps = columns([30.0] * 5)
    shift = round((START_S + end_s) * S) - int(steps.end_unix_ns[-1])
    return replace(steps, end_unix_ns=steps.end_unix_ns + shift)


def seconds(folder: Path, rank: int) -> tuple[float, float]:
    times = read_run_times(folder / f"rank-{rank:05d}", steps_until(30))
    assert times is not None
    assert times.notes == ()
    return times.began_ns / S - START_S, times.ended_ns / S - START_S


def test_a_rank_of_the_commands_own_host(tmp_path: Path) -> None:
    assert seconds(make_run(tmp_path), 0) == pytest.approx((0, 60))


def test_one_command_with_ranks_on_other_hosts(tmp_path: Path) -> None:
    """Meetings bring its times to the rank's clock: 3 s at the beginning, 3.2 s at the end."""
    assert seconds(make_run(tmp_path), 1) == pytest.approx((3, 63.2))


def test_one_command_on_every_host(tmp_path: Path) -> None:
    """The rank's own host wrote them by the rank's own clock; no meeting is needed."""
    hosts = [
        {"host": "node0", "started_unix": START_S, "ended_unix": START_S + 60},
        {"host": "node1", "started_unix": START_S + 5, "ended_unix": START_S + 62},
        {"host": "node1", "started_unix": START_S + 4, "ended_unix": START_S + 64},
    ]
    folder = make_run(tmp_path)
    for place, content in enumerate(hosts):
        write(folder / "hosts" / f"{place:05d}.json", content)
    (folder / "rank-00001" / "clock.json").unlink()
    assert seconds(folder, 0) == pytest.approx((0, 60))
    assert seconds(folder, 1) == pytest.approx((4, 64))  # of all its tasks


def test_a_host_without_a_command_of_its_own(tmp_path: Path) -> None:
    """As when srun starts ranks from the first host: its clock is brought to the rank's."""
    folder = make_run(tmp_path)
    times = {"started_unix": START_S, "ended_unix": START_S + 60}
    process = {"pid": 1, "host": "node0"}
    write(folder / "hosts" / "00000.json", {"host": "node0", "process": process, **times})
    assert seconds(folder, 1) == pytest.approx((3, 63.2))


def test_clocks_that_nobody_compared_are_told_where_they_contradict(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "rank-00001" / "clock.json").unlink()
    assert seconds(folder, 1) == pytest.approx((0, 60))  # nothing is odd
    times = read_run_times(folder / "rank-00001", steps_until(90))
    assert times is not None
    assert times.notes == (
        "the clocks of node1 and of node0, where the command ran, are unknown, so start-up and "
        "shut-down are not known",
    )


def test_a_command_on_a_host_without_ranks(tmp_path: Path) -> None:
    folder = make_run(tmp_path, process={"pid": 1, "host": "login"})
    assert seconds(folder, 1) == pytest.approx((0, 60))


# When the command of a rank began and ended, for hosts with and without a `stepscope run`.


def test_a_rank_that_srun_started_on_another_host_takes_the_batch_scripts_attempt(
    tmp_path: Path,
) -> None:
    """Attempt 1 ran from 100 to 120 s, was queued until 300 s and ended at 350 s."""
    (tmp_path / "hosts").mkdir()
    for attempt, started, ended in ((0, 100.0, 120.0), (1, 300.0, 350.0)):
        part = {"host": "node1", "attempt": attempt, "place": 0}
        part |= {"started_unix": started, "ended_unix": ended}
        (tmp_path / "hosts" / f"00000.{attempt + 1}.json").write_text(json.dumps(part))
    times = {"started_unix": 100.0, "ended_unix": 350.0}
    (tmp_path / "run.json").write_text(json.dumps(times))
    for host in ("node1", "node2"):
        first = read_command_times(tmp_path, host, 101_000_000_000)
        second = read_command_times(tmp_path, host, 301_000_000_000)
        assert (first, second) == (CommandTimes(100.0, 120.0), CommandTimes(300.0, 350.0))


# Attempts of a job that grows or shrinks when it is restarted.

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
