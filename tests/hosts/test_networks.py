"""What the network between hosts does to a capture: nothing that the training would notice."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from jobs_on_hosts import capture, codes, explain, finish, losses, start
from lab import HostOutcome, Lab

# Connects to every port that a process of this host opens while it runs, and misbehaves.
STRANGER = """
import itertools, socket, time

def listening():
    ports = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = open(name).read().splitlines()[1:]
        except OSError:
            continue
        ports |= {int(line.split()[1].rpartition(":")[2], 16) for line in lines
                  if line.split()[3] == "0A"}
    return ports

known = listening()
print("watching", flush=True)
manners = itertools.cycle([b"", b"x", b"hello, who is there?", bytes(1_000_000), None])
held = []
until = time.monotonic() + 60
while time.monotonic() < until:
    for port in listening() - known:
        for message in itertools.islice(manners, 5):
            try:
                peer = socket.create_connection(("127.0.0.1", port), timeout=1)
                if message:
                    peer.sendall(message)
                if message is None:
                    peer.close()
                else:
                    peer.setblocking(False)
                    held.append(peer)
                print("knocked", flush=True)
            except OSError:
                print("refused", flush=True)
    for peer in list(held):
        try:
            print("answered" if peer.recv(1) else "closed", flush=True)
        except BlockingIOError:
            continue
        except OSError:
            print("closed", flush=True)
        held.remove(peer)
    time.sleep(0.01)
"""


def separate(lab: Lab, folder: Path) -> dict[str, list[str]]:
    """Each host captures into a folder of its own."""
    return {name: capture(folder / name) for name in lab.hosts}


@pytest.mark.slow
def test_a_stranger_at_our_port_is_refused_and_changes_nothing(
    lab: Lab, bare: Mapping[str, HostOutcome], tmp_path: Path
) -> None:
    """Rank 1 comes late to every meeting of the clocks, so that the port stays open for it."""
    go = tmp_path / "go"
    env = {"STEPS": "14", "HOLD_AT": "3", "HOLD_FILE": str(go)}
    tardy = {"TARDY_HOST": "node1", "TARDY_MS": "300", "TARDY_FROM": "3"}
    job = start(lab, separate(lab, tmp_path), env | tardy)
    job["node0"].wait_for_line("holding")
    stranger = lab.start("node0", [sys.executable, "-c", STRANGER])
    stranger.wait_for_line("watching")
    go.touch()
    captured = finish(job)
    assert "knocked" in stranger.stdout()
    assert "closed" in stranger.stdout()
    assert "answered" not in stranger.stdout()
    assert codes(captured) == codes(bare) == {"node0": 0, "node1": 0}
    assert losses(captured, 14) == losses(bare, 14)
    answer = explain(tmp_path / "node0", tmp_path / "node1")
    assert "rounds" in answer["clock"]["sources"]


@pytest.mark.slow
def test_behind_a_firewall_clocks_are_compared_through_the_store(
    lab: Lab, bare: Mapping[str, HostOutcome], tmp_path: Path
) -> None:
    """The firewall comes up after the job has connected: only what is new is lost, silently."""
    go = tmp_path / "go"
    env = {"STEPS": "20", "HOLD_AT": "3", "HOLD_FILE": str(go)}
    lab.shift_clock("node1", 3_000)
    job = start(lab, separate(lab, tmp_path), env)
    for process in job.values():
        process.wait_for_line("holding")
    lab.firewall("node0")
    go.touch()
    captured = finish(job)
    assert codes(captured) == {"node0": 0, "node1": 0}
    assert losses(captured, 20) == losses(bare, 20)
    answer = explain(tmp_path / "node0", tmp_path / "node1")
    clock = answer["clock"]
    assert clock["sources"] == ["collectives", "rounds"]
    assert abs(clock["offset_ns"]["1"] - 3e9) < clock["error_ns"]["1"] < 50e6
    (note,) = clock["notes"]
    assert note.startswith("node1 could not connect to node0")
    assert [note["id"] for note in answer["quality"]].count("clock-meetings") == 1
    for name, rank in (("node0", 0), ("node1", 1)):
        file = tmp_path / name / f"rank-{rank:05d}" / "clock.json"
        syncs = json.loads(file.read_text())["syncs"]
        assert [sync["through"] for sync in syncs] == ["store", "store"]
