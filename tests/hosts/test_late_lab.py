"""Hosts whose messages arrive late, whatever the kernel offers for it."""

from __future__ import annotations

import pytest
from late_lab import LateLab, why_no_late_links

pytestmark = pytest.mark.skipif(why_no_late_links() is not None, reason=str(why_no_late_links()))

ANSWER = """
import socket
listener = socket.create_server(("", 7777))
print("listening", flush=True)
connection, _ = listener.accept()
while data := connection.recv(100):
    connection.send(data)
"""
ASK = """
import socket, time
connection = socket.create_connection(("node1", 7777))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(3):
    began = time.monotonic()
    connection.send(b"x")
    connection.recv(1)
    print((time.monotonic() - began) * 1e3)
"""


def test_no_answer_comes_before_two_delays_are_over() -> None:
    with LateLab(2, delay_ms=20.0) as lab:
        lab.start("node1", ["python3", "-u", "-c", ANSWER]).wait_for_line("listening")
        done = lab.start("node0", ["python3", "-c", ASK]).wait()
    assert done.code == 0, done.stderr
    assert min(map(float, done.stdout.split())) >= 40
