"""The recorder is read before it overwrites itself, within a budget, and packed small."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest
from two_ranks import run_ranks

from stepscope.measure.cluster import clock_sync
from stepscope.measure.cluster.flight_recorder import FIRST_STEP, SLOT, CollectiveLog, read_columns
from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.rank_folder import read_collective_log

if TYPE_CHECKING:
    from pathlib import Path

CAPACITY = 2000


class Recorder:
    """A ring like torch's: it takes 20 microseconds to read an entry."""

    def __init__(self, per_step: int, step_s: float = 0.01) -> None:
        self.per_step, self.step_s = per_step, step_s
        self.now = 0.0
        self.count = 0
        self.spent = 0.0

    def run_until(self, log: CollectiveLog, steps: int) -> None:
        for step in range(steps):
            self.now += self.step_s
            self.count += self.per_step
            log.step_begins(step + 1)

    def dump(self) -> bytes:
        entries = [entry(number) for number in range(max(0, self.count - CAPACITY), self.count)]
        self.now += 20e-6 * len(entries)
        self.spent += 20e-6 * len(entries)
        return json.dumps({"entries": entries}, separators=(",", ":")).encode()

    def log(self, folder: Path) -> CollectiveLog:
        dumps = [("_dump_fr_trace_json", self.dump)]
        return CollectiveLog(folder, recorders=lambda: dumps, now=lambda: self.now)


def entry(number: int, **changes: Any) -> dict[str, Any]:
    usual = {
        "collective_seq_id": number + 1,
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "record_id": number,
        "time_created_ns": 1_700_000_000_000_000_000 + 1_000_000 * number,
    }
    return {**usual, **changes}


def text(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"entries": entries}, separators=(",", ":")).encode()


def sequences(folder: Path) -> list[int]:
    oddities = Oddities("collectives")
    log = read_collective_log(folder, oddities)
    assert not oddities.notes
    return log.sequence.tolist() if log is not None else []


def test_every_collective_of_a_small_job_is_kept_once(tmp_path: Path) -> None:
    recorder = Recorder(per_step=2, step_s=0.05)
    log = recorder.log(tmp_path)
    recorder.run_until(log, 5000)
    log.close(5000)
    assert sequences(tmp_path) == list(range(1, 10_001))


@pytest.mark.parametrize("per_step", [1, 5, 100, 5000])
@pytest.mark.parametrize("step_s", [0.01, 1.0])
def test_reading_takes_at_most_a_500th_of_the_run(
    tmp_path: Path, per_step: int, step_s: float
) -> None:
    recorder = Recorder(per_step, step_s)
    log = recorder.log(tmp_path)
    recorder.run_until(log, 20_000 if step_s < 1 else 2000)
    # The very first reading comes when nothing is known of the recorder yet.
    assert recorder.spent <= 0.002 * recorder.now + 0.04
    assert sequences(tmp_path)


def test_many_collectives_a_step_are_seen_in_stretches(tmp_path: Path) -> None:
    recorder = Recorder(per_step=500)
    log = recorder.log(tmp_path)
    recorder.run_until(log, 10_000)
    log.close(10_000)
    kept = sequences(tmp_path)
    assert kept[-1] == 5_000_000
    assert CAPACITY <= len(kept) < 50_000


def test_a_month_of_steps_stays_small(tmp_path: Path) -> None:
    """Readings become rarer: a few hundred of them, and a few megabytes."""
    recorder = Recorder(per_step=5, step_s=1.0)
    log = recorder.log(tmp_path)
    step = 0
    while step < 30 * 86_400:
        step = log.due
        recorder.now, recorder.count = float(step), 5 * step
        log.step_begins(step)
    log.close(step + 1)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10_000_000


def test_a_step_that_is_profiled_is_left_alone(tmp_path: Path) -> None:
    recorder = Recorder(per_step=1)
    log = recorder.log(tmp_path)
    log.step_begins(FIRST_STEP, disturbed=True)
    assert recorder.spent == 0
    assert log.due == FIRST_STEP + SLOT


def test_a_disk_that_refuses_and_a_recorder_that_fails_do_no_harm(tmp_path: Path) -> None:
    log = Recorder(per_step=1).log(tmp_path / "missing")
    log.step_begins(FIRST_STEP)
    log.close(FIRST_STEP + 1)

    def broken() -> bytes:
        raise RuntimeError("no recorder")

    log = CollectiveLog(tmp_path, recorders=lambda: [("broken", broken)])
    log.step_begins(FIRST_STEP)
    assert log.due > FIRST_STEP
    log.close(FIRST_STEP + 1)
    assert not list(tmp_path.iterdir())


def test_sends_and_receives_are_left_out() -> None:
    columns = read_columns(text(entry(0), entry(1, is_p2p=True), entry(2)))
    assert columns["sequence"] == [1, 3]


def test_names_that_need_escapes_are_read_too() -> None:
    columns = read_columns(text(entry(0, process_group=['a "b"', ""]), entry(1)))
    assert columns["group"] == ['a "b"', "0"]
    assert columns["created_ns"][1] - columns["created_ns"][0] == 1_000_000


def test_durations_are_kept_where_all_entries_have_them() -> None:
    assert read_columns(text(entry(0, duration_ms=1.5)))["duration_ns"] == [1_500_000]
    assert "duration_ns" not in read_columns(text(entry(0, duration_ms=1.5), entry(1)))


def test_an_empty_recorder_writes_nothing(tmp_path: Path) -> None:
    recorder = Recorder(per_step=0)
    log = recorder.log(tmp_path)
    recorder.run_until(log, 200)
    log.close(200)
    assert not list(tmp_path.iterdir())


def test_a_log_that_was_cut_is_read_up_to_there(tmp_path: Path) -> None:
    recorder = Recorder(per_step=1, step_s=0.1)
    log = recorder.log(tmp_path)
    recorder.run_until(log, 1000)
    log.close(1000)
    (file,) = tmp_path.iterdir()
    packed = file.read_bytes()
    file.write_bytes(packed[:-20])
    kept = sequences(tmp_path)
    assert kept == list(range(1, len(kept) + 1))
    assert 0 < len(kept) < 1000


@pytest.mark.parametrize(
    "content",
    [
        b"nonsense",
        gzip.compress(b"nonsense\n"),
        gzip.compress(b'{"created_ns": [1], "sequence": [1, 2], "group": [0], "name": [0], '
                      b'"groups": ["0"], "names": ["x"]}\n'),
        gzip.compress(b'{"created_ns": [1], "sequence": [1], "group": [7], "name": [0], '
                      b'"groups": ["0"], "names": ["x"]}\n'),
    ],
    ids=["no gzip", "no JSON", "uneven columns", "unknown group"],
)  # fmt: skip
def test_a_log_that_makes_no_sense_is_not_captured(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "collectives-00001.json.gz").write_bytes(content)
    oddities = Oddities("collectives")
    assert read_collective_log(tmp_path, oddities) is None
    assert oddities.notes


def test_a_real_job_is_read_after_its_group_is_gone(tmp_path: Path) -> None:
    """Rank 1 sleeps before every collective: its arrivals are later, at the same collectives."""
    body = f"""
    import pathlib
    from stepscope.measure.cluster.flight_recorder import CollectiveLog
    folder = pathlib.Path({str(tmp_path)!r}) / f"rank-{{rank}}"
    folder.mkdir()
    log = CollectiveLog(folder)
    for step in range(8):
        time.sleep(0.02 * rank)
        dist.all_reduce(torch.ones(4))
        log.step_begins(step)
    dist.destroy_process_group()
    log.close(8)
    answer["steps"] = 8
    """
    assert run_ranks(tmp_path, body)
    logs = [
        read_collective_log(tmp_path / f"rank-{rank}", Oddities("collectives")) for rank in (0, 1)
    ]
    assert logs[0] is not None
    assert logs[1] is not None
    reduces = [
        log.created_ns[log.name == log.names.index("gloo:all_reduce")][-8:]
        for log in logs
        if log is not None
    ]
    assert [len(created) for created in reduces] == [8, 8]
    late = sorted((reduces[1] - reduces[0]).tolist())[4]
    assert late > 5_000_000
    assert set(logs[0].sequence[-8:].tolist()) == set(logs[1].sequence[-8:].tolist())


# Clocks of several hosts


@pytest.mark.parametrize(
    ("local", "world", "several"),
    [("4", "4", False), ("4", "8", True), ("", "8", True), ("", "", True)],
)
def test_only_ranks_on_several_hosts_meet(
    monkeypatch: pytest.MonkeyPatch, local: str, world: str, several: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setenv("WORLD_SIZE", world)
    sync = clock_sync.ClockSync()
    assert (sync.next_meeting(5) == 100) is several
    assert (sync.next_meeting(101) == 200) is several
