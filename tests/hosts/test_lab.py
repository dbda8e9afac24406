"""The laboratory itself: hosts differ as machines do, and nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lab import Lab, why_no_shifted_clock

SEND = """
import socket, sys, time
size = int(sys.argv[1])
with socket.create_server(("10.77.0.1", 5000)) as server:
    peer, _ = server.accept()
    began, got = time.monotonic(), 0
    while got < size:
        got += len(peer.recv(65536))
    print(time.monotonic() - began)
"""
RECEIVE = """
import socket, sys, time
while True:
    try:
        peer = socket.create_connection(("10.77.0.1", 5000), timeout=5)
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
peer.sendall(bytes(int(sys.argv[1])))
"""
KNOCK = """
import socket, time
first = socket.create_connection(("10.77.0.1", 5001), timeout=5)
print("connected", flush=True)
time.sleep(2)
first.sendall(b"still there")
try:
    socket.create_connection(("10.77.0.1", 5002), timeout=1)
except OSError as error:
    print("refused", type(error).__name__)
"""
ANSWER = """
import socket
with socket.create_server(("10.77.0.1", 5001)) as old, socket.create_server(("10.77.0.1", 5002)):
    print("listening", flush=True)
    peer, _ = old.accept()
    print(peer.recv(100).decode())
"""
SLEEP = """
import time
began = time.monotonic()
time.sleep(0.2)
print(time.time(), time.monotonic() - began)
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_a_host_has_its_own_name_address_and_processes(lab: Lab) -> None:
    show = "hostname; cat /proc/sys/kernel/random/boot_id; ps -e | wc -l; getent hosts node0"
    first, second = (lab.start(name, ["sh", "-c", show]).wait(20) for name in lab.hosts)
    names = [one.stdout.split()[0] for one in (first, second)]
    boots = [one.stdout.split()[1] for one in (first, second)]
    assert names == ["node0", "node1"]
    assert boots[0] != boots[1]
    assert int(first.stdout.split()[2]) < 10
    assert second.stdout.split()[3:] == ["10.77.0.1", "node0"]
    assert os.uname().nodename not in names


def test_exit_codes_and_signals_come_back(lab: Lab) -> None:
    assert lab.start("node0", ["sh", "-c", "exit 7"]).wait(20).code == 7
    sleeper = lab.start("node1", ["sleep", "60"])
    time.sleep(0.2)
    sleeper.signal(signal.SIGTERM)
    assert sleeper.wait(20).code == -signal.SIGTERM


def test_a_shaped_link_is_as_slow_as_it_should_be(lab: Lab) -> None:
    """1 MB over 20 Mbit/s takes 0.4 s; the bucket lets the first 64 KB through at once."""
    lab.shape("node1", "20mbit")
    server = lab.start("node0", python(SEND, "1000000"))
    lab.start("node1", python(RECEIVE, "1000000")).wait(30)
    assert 0.3 < float(server.wait(30).stdout) < 1.5


def test_a_firewall_keeps_connections_and_lets_no_new_one_through(lab: Lab) -> None:
    server = lab.start("node0", python(ANSWER))
    server.wait_for_line("listening", 20)
    client = lab.start("node1", python(KNOCK))
    client.wait_for_line("connected", 20)
    lab.firewall("node1")
    assert "refused" in client.wait(30).stdout
    assert "still there" in server.wait(30).stdout


def test_a_folder_is_read_only_on_one_host(lab: Lab, tmp_path: Path) -> None:
    lab.make_read_only("node1", tmp_path)
    touch = {name: lab.start(name, ["touch", str(tmp_path / name)]).wait(20) for name in lab.hosts}
    assert [touch[name].code for name in lab.hosts] == [0, 1]
    assert [path.name for path in tmp_path.iterdir() if path.name in lab.hosts] == ["node0"]


@pytest.mark.skipif(why_no_shifted_clock() is not None, reason=str(why_no_shifted_clock()))
def test_a_clock_is_off_and_sleeps_are_not(lab: Lab) -> None:
    lab.shift_clock("node1", 3_000)
    before = time.time()
    wall, slept = map(float, lab.start("node1", python(SLEEP)).wait(20).stdout.split())
    assert 3.0 < wall - before < 13
    assert 0.2 <= slept < 3


def test_a_host_that_dies_takes_its_processes_along(lab: Lab, tmp_path: Path) -> None:
    code = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    inside = [tmp_path / name for name in lab.hosts]
    running = [
        lab.start(name, [sys.executable, "-c", code, str(place)])
        for name, place in zip(lab.hosts, inside, strict=True)
    ]
    deadline = time.monotonic() + 20
    while not all(place.exists() for place in inside) and time.monotonic() < deadline:
        time.sleep(0.05)
    lab.kill("node1")
    assert running[1].wait(20).code == -signal.SIGKILL
    assert running[0].running()


def test_nothing_stays_when_the_laboratory_is_killed(lab: Lab, tmp_path: Path) -> None:
    code = (
        "from lab import Lab; import time\n"
        "with Lab(hosts=1) as lab:\n"
        "    print(*[keeper.pid for keeper in lab._keepers], flush=True); time.sleep(60)"
    )
    here = Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=here, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        keepers = [Path("/proc") / pid for pid in owner.stdout.readline().split()]
        assert all(keeper.exists() for keeper in keepers)
        owner.kill()
    deadline = time.monotonic() + 20
    while any(keeper.exists() for keeper in keepers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(keeper.exists() for keeper in keepers)
