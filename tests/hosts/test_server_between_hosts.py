"""A parameter server over two Ray nodes, each a host of its own: one dies, or its link is cut."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import HostProcess, Lab, why_not

from server_event_lines import event_from
from stepscope.fix.server.membership import MemberChange, Push, ShardRestored

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
SCRIPT = Path(__file__).with_name("train_on_server.py")
PORT = 6379
QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


@pytest.fixture
def session_folder() -> Iterator[Path]:
    """Short: it has sockets in it, and their names must not be long."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start_ray(lab: Lab, name: str, folder: Path) -> HostProcess:
    """Each host has a folder of its own for sockets and logs, under the same name."""
    head = lab.hosts["node0"].address
    own = ["--head", f"--port={PORT}", f"--temp-dir={folder}", "--include-dashboard=false"]
    options = own if name == "node0" else [f"--address={head}:{PORT}"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
    command += [f"--node-ip-address={lab.hosts[name].address}", "--num-cpus=4", "--block"]
    mount = f"mount -t tmpfs tmpfs {folder} && exec {' '.join(command)}"
    return lab.start(name, ["sh", "-c", mount], QUIET)


def start_training(lab: Lab, folder: Path, run: Path, steps: int) -> HostProcess:
    for name in lab.hosts:
        start_ray(lab, name, folder).wait_for_line("Ray runtime started", 120)
    address = f"{lab.hosts['node0'].address}:{PORT}"
    command = [sys.executable, str(SCRIPT), address, str(run), str(steps)]
    return lab.start("node0", command, QUIET)


def events(run: Path, kind: type) -> list[Any]:
    found = []
    for file in sorted((run / "together").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            try:
                event = event_from(json.loads(line))
            except ValueError:
                continue  # the last line of a process that was killed
            if type(event) is kind:
                found.append(event)
    return found


def wait_until_clock(run: Path, clock: int, job: HostProcess) -> None:
    deadline = time.monotonic() + 240
    while not any(one.clock >= clock for one in events(run, Push)):
        assert job.running(), job.stderr()[-3000:]
        assert time.monotonic() < deadline, job.stderr()[-3000:]
        time.sleep(0.2)


def no_update_lost(run: Path, end: dict[str, Any]) -> None:
    """Everything that any worker was told is applied is in the parameters, once."""
    acked = {(one.worker, one.life, one.clock) for one in events(run, Push)}
    assert len(acked) > 20
    for shard in ("ledger0", "ledger1"):
        assert acked <= {tuple(one) for one in end["final"][shard]}
    assert end["twice"] == 0
    assert all(one.lost == () for one in events(run, ShardRestored))


def test_a_node_is_killed_and_training_goes_on(tmp_path: Path, session_folder: Path) -> None:
    run = tmp_path / "run"
    with Lab(hosts=2) as lab:
        job = start_training(lab, session_folder, run, steps=40)
        wait_until_clock(run, 4, job)
        lab.kill("node1")
        outcome = job.wait(280)
    assert outcome.code == 0, outcome.stderr[-3000:]
    end = json.loads(outcome.stdout.splitlines()[-1])
    assert len(end["lost"]) == 2  # the workers on the node that died
    assert len(end["acked"]) == 2 * 40
    no_update_lost(run, end)
    assert [one.source for one in events(run, ShardRestored)] == ["replica"]
    evicted = [one for one in events(run, MemberChange) if one.change == "evicted"]
    assert len(evicted) == 2


def test_a_cut_link_comes_back_and_so_do_its_workers(tmp_path: Path, session_folder: Path) -> None:
    run = tmp_path / "run"
    with Lab(hosts=2) as lab:
        job = start_training(lab, session_folder, run, steps=60)
        wait_until_clock(run, 4, job)
        lab.unplug("node1")
        time.sleep(12)
        lab.plug("node1")
        outcome = job.wait(280)
    assert outcome.code == 0, outcome.stderr[-3000:]
    end = json.loads(outcome.stdout.splitlines()[-1])
    assert end["lost"] == []  # all four workers reached their end
    no_update_lost(run, end)
