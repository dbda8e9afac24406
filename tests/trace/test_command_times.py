"""When the command of a rank began and ended, for hosts with and without a `stepscope run`."""

from __future__ import annotations

import json
from pathlib import Path

from stepscope.trace.run_folder.run_times import CommandTimes, read_command_times


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
