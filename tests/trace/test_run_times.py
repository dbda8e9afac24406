"""When a rank's part of the command began and ended, on the clock of its own host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from explain.whole_run.columns import columns
from stepscope.records.rank import StepColumns
from stepscope.trace.run_folder.run_times import read_run_times

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
