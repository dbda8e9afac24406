"""What a rank's load is: counters over plain steps only, never an error, never a changed bit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from stepscope.measure import machine
from stepscope.measure import machine as host_load
from stepscope.measure.machine import HostLoadMeter, RunningProcess
from stepscope.records import processors
from stepscope.records.rank_facts import PlainSteps

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


class Clock:
    """Counters that a test moves on."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {"wall_ns": 0, "user_ns": 0, "waiting_ns": 0, "busy_ns": None}
        self.told["processes"] = None

    def __call__(self, *, several: bool) -> dict[str, Any]:
        self.several = several
        return dict(self.told)

    def advance(self, **more: int) -> None:
        for name, value in more.items():
            self.told[name] += value


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(host_load, "counters", made)
    return made


def plain_of(load: HostLoadMeter) -> dict[str, Any]:
    content = load.content()
    assert content is not None
    found: dict[str, Any] = content["plain"]
    return found


def test_only_plain_steps_count(clock: Clock) -> None:
    load = HostLoadMeter()
    load.resume(1, plain=True)
    clock.advance(wall_ns=100, user_ns=60)
    load.pause(4)
    load.resume(4, plain=False)  # the profiler's window
    clock.advance(wall_ns=1000, user_ns=1000)
    load.pause(9)
    load.resume(9, plain=True)
    clock.advance(wall_ns=50, user_ns=50, waiting_ns=5)
    load.pause(10)
    found = plain_of(load)
    assert (found["steps"], found["wall_ns"], found["user_ns"]) == (4, 150, 110)
    assert found["waiting_ns"] == 5
    assert found["busy_ns"] is None  # what the system does not tell is not zero


def test_a_stretch_without_a_step_is_none(clock: Clock) -> None:
    load = HostLoadMeter()
    assert load.content() is None
    load.resume(3, plain=True)
    clock.advance(wall_ns=100)
    load.pause(3)
    content = load.content()
    assert content is not None
    assert content["plain"] is None


def test_programs_outside_the_job_are_summed_by_name(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = os.getpid()
    monkeypatch.setattr(machine, "_captured", lambda _pid: False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def seen(**cpu_ns: int) -> dict[int, RunningProcess]:
        return {
            ours: RunningProcess("python", 1, cpu_ns["ours"]),
            7: RunningProcess("loader", ours, 500),
            8: RunningProcess("make", 1, cpu_ns["first"]),
            9: RunningProcess("make", 1, cpu_ns["second"]),
        }

    clock.told["processes"] = seen(ours=0, first=0, second=0)
    load = HostLoadMeter()
    load.resume(1, plain=True)
    clock.advance(wall_ns=1000)
    clock.told["processes"] = seen(ours=900, first=300, second=200)
    load.pause(2)
    assert plain_of(load)["others"] == [{"name": "make", "cores": 0.5}]


@LINUX
def test_a_worker_that_has_ended_is_still_the_jobs() -> None:
    """A loader's workers live for an epoch: what they used is not that of other programs."""
    before = machine.counters(several=False)["job_ns"]
    burn = "import time\nwhile time.process_time() < 0.25: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert machine.counters(several=False)["job_ns"] - before >= 200_000_000


def test_ranks_of_one_parent_are_counted_though_their_group_ends_first(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mp.spawn starts them, with no launcher that says how many there are."""
    world = [2]
    monkeypatch.setattr(host_load, "rank_and_world", lambda: (0, world[0]))
    monkeypatch.setattr(machine, "_captured", lambda _pid: False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def seen(cpu_ns: int) -> dict[int, RunningProcess]:
        ranks = {
            os.getpid(): RunningProcess("python", 5, cpu_ns),
            7: RunningProcess("python", 5, cpu_ns),
        }
        return {**ranks, 5: RunningProcess("python", 1, 0), 8: RunningProcess("tracker", 5, 0)}

    clock.told["processes"] = seen(0)
    load = HostLoadMeter()
    load.resume(1, plain=True)
    clock.advance(wall_ns=1000)
    clock.told["processes"] = seen(900)
    world[0] = 1  # destroy_process_group
    load.pause(2)
    content = load.content()
    assert content is not None
    assert content["local_ranks"] == 2
    assert content["plain"]["others"] == []
    assert clock.several


def test_what_fails_is_noted_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> dict[str, Any]:
        raise OSError("no /proc here")

    monkeypatch.setattr(host_load, "counters", broken)
    load = HostLoadMeter()
    load.resume(1, plain=True)
    load.pause(2)
    assert plain_of(load) is None


def test_denormal_values_of_a_training_are_found_and_left_as_they_are() -> None:
    weights = torch.nn.Parameter(torch.full((100,), 1.0))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    weights.grad = torch.full((100,), 1e-40)
    optimizer.step()
    before = weights.grad.clone()
    load = HostLoadMeter()
    load.resume(1, plain=True)
    load.pause(2, [optimizer])
    content = load.content()
    assert content is not None
    assert content["denormal_share"] == pytest.approx(2 / 3)  # gradient and momentum, not weights
    assert torch.equal(weights.grad, before)


def test_flushing_is_noticed() -> None:
    assert processors.flushes_denormals() is False
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        assert processors.flushes_denormals() is True
    finally:
        torch.set_flush_denormal(False)


@LINUX
def test_own_processor_time_and_waits_are_counted() -> None:
    before = machine.counters()
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    spent = machine.growth(before, machine.counters())
    assert spent["user_ns"] + spent["system_ns"] >= 40_000_000
    assert spent["wall_ns"] >= 40_000_000
    assert {name for name, value in spent.items() if value is None} <= {"throttled_ns"}
    PlainSteps(steps=1, **spent)  # the names are the record's


@LINUX
def test_what_this_process_started_belongs_to_the_job_and_its_shell_does_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    try:
        processes = machine._processes()
        assert processes is not None
        assert {os.getpid(), child.pid} <= machine.job_processes(processes)
        assert 1 not in machine.job_processes(processes)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_a_quota_is_read_from_either_kind_of_control_group(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert processors.quota_of(tmp_path) == cores


def test_without_proc_everything_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_PROC", tmp_path / "nowhere")
    monkeypatch.setattr(processors, "_PROC", tmp_path / "nowhere")
    monkeypatch.setattr(processors, "_CGROUP", tmp_path / "nowhere")
    found = machine.counters()
    for name in ("waiting_ns", "training_waiting_ns", "busy_ns", "job_ns", "throttled_ns"):
        assert found[name] is None
    assert processors.quota_cores() is None
    assert machine.machine_facts()["threads"] == torch.get_num_threads()


@LINUX
def test_the_training_threads_wait_is_its_own() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        found = machine._own_waits()
        assert 0 <= found["training_waiting_ns"] <= found["waiting_ns"]
    finally:
        done.set()
        thread.join()
