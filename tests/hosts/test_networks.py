"""What the network between hosts does to a capture: nothing that the training would notice."""

from __future__ import annotations

import sys
from pathlib import Path

from jobs_on_hosts import capture, codes, explain, finish, losses, run, start
from lab import Lab

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
                held.append(peer)
                print("knocked", flush=True)
            except OSError:
                print("refused", flush=True)
    time.sleep(0.01)
"""


def separate(lab: Lab, folder: Path) -> dict[str, list[str]]:
    """Each host captures into a folder of its own."""
    return {name: capture(folder / name) for name in lab.hosts}


def test_a_stranger_at_our_port_is_refused_and_changes_nothing(lab: Lab, tmp_path: Path) -> None:
    """Rank 1 comes late to every meeting of the clocks, so that the port stays open for it."""
    go = tmp_path / "go"
    env = {"STEPS": "14", "WORK_MS": "5", "TARDY_HOST": "node1", "TARDY_MS": "300"}
    bare = run(lab, env=env)
    held = {"HOLD_AT": "3", "HOLD_FILE": str(go), "TARDY_FROM": "3"}
    job = start(lab, separate(lab, tmp_path), {**env, **held})
    job["node0"].wait_for_line("holding")
    stranger = lab.start("node0", [sys.executable, "-c", STRANGER])
    stranger.wait_for_line("watching")
    go.touch()
    captured = finish(job)
    assert "knocked" in stranger.stdout()
    assert codes(captured) == codes(bare) == {"node0": 0, "node1": 0}
    assert losses(captured) == losses(bare)
    answer = explain(tmp_path / "node0", tmp_path / "node1")
    assert "rounds" in answer["clock"]["sources"]


def test_a_firewall_against_our_ports_leaves_clocks_to_the_collectives(
    lab: Lab, tmp_path: Path
) -> None:
    """The firewall comes up after the job has connected: only what is new is lost, silently."""
    go = tmp_path / "go"
    env = {"STEPS": "30", "HOLD_AT": "3", "HOLD_FILE": str(go)}
    lab.shift_clock("node1", 3_000)
    job = start(lab, separate(lab, tmp_path), env)
    for process in job.values():
        process.wait_for_line("holding")
    lab.firewall("node0")
    go.touch()
    captured = finish(job)
    assert codes(captured) == {"node0": 0, "node1": 0}
    assert len(losses(captured)) == 60
    answer = explain(tmp_path / "node0", tmp_path / "node1")
    clock = answer["clock"]
    assert clock["sources"] == ["collectives"]
    assert abs(clock["offset_ns"]["1"] - 3e9) < clock["error_ns"]["1"] < 50e6
