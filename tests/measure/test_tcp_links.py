"""What a rank's own TCP connections say about its links."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stepscope.measure.cluster import tcp_links
from stepscope.measure.cluster.tcp_links import (
    LEAST_BYTES,
    Connection,
    Counters,
    Links,
    address_text,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux counts")
MEGABYTE = 1 << 20


@contextmanager
def connected() -> Iterator[socket.socket]:
    """A connection to a server that throws everything away."""

    def swallow(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer:
            while peer.recv(MEGABYTE):
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=swallow, args=(server,), daemon=True)
        thread.start()
        with socket.create_connection(server.getsockname()) as client:
            yield client
        thread.join(timeout=10)


def sent_by(client: socket.socket, size: int, *, earlier: int = 0) -> int:
    """Until all of it is acknowledged."""
    client.sendall(bytes(size))
    for _ in range(1000):
        mine = [
            one for one in tcp_links.connections() if one.inode == os.fstat(client.fileno()).st_ino
        ]
        if mine[0].counters.sent_bytes >= earlier + size:
            return mine[0].counters.sent_bytes
        threading.Event().wait(0.01)
    raise TimeoutError


def test_only_what_was_sent_after_the_first_look_counts() -> None:
    with connected() as client:
        before = sent_by(client, 2 * MEGABYTE)
        looks = Links()
        looks.look(3)
        assert looks.content() is None
        after = sent_by(
            client, 100 * MEGABYTE, earlier=before
        )  # busy time is counted in ticks of 4 ms
        looks.look(9)
        content = looks.content()
    assert content is not None
    (row,) = [one for one in content["peers"] if one["peer"] == "127.0.0.1"]
    assert content["steps"] == [3, 9]
    assert row["sent_bytes"] == after - before
    assert row["connections"] == 1
    assert row["busy_us"] > 0
    assert row["delivery_bytes_s"] > 0
    assert content["addresses"] == []  # loopback is no address of this host


def test_a_connection_opened_after_the_first_look_counts_as_a_whole() -> None:
    looks = Links()
    looks.look(0)
    with connected() as client:
        sent = sent_by(client, 3 * MEGABYTE)
        looks.look(1)
    looks.look(2)  # it is closed by now, and still counts
    content = looks.content()
    assert content is not None
    assert [row["sent_bytes"] for row in content["peers"]] == [sent]


def test_a_connection_that_sends_little_says_nothing() -> None:
    with connected() as client:
        looks = Links()
        looks.look(0)
        sent_by(client, LEAST_BYTES // 2)
        looks.look(1)
        content = looks.content()
    assert content is not None
    assert content["peers"] == []


def test_looking_changes_no_socket_even_under_a_default_timeout() -> None:
    with connected() as client:
        socket.setdefaulttimeout(5.0)
        try:
            tcp_links.connections()
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(client.fileno())
        before = len([*Path("/proc/self/fd").iterdir()])
        tcp_links.connections()
        assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_other_descriptors_are_no_connections() -> None:
    def inodes() -> set[int]:
        return {one.inode for one in tcp_links.connections()}

    known = inodes()
    left, right = socket.socketpair()
    with (
        left,
        right,
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    ):
        assert inodes() == known


def test_rows_add_up_over_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: two connections to one peer; 4 + 2 MB, 40 + 10 ms busy, 5 ms without room."""

    def seen(inode: int, megabytes: int, busy_us: int, limited_us: int) -> Connection:
        counters = Counters(megabytes * MEGABYTE, busy_us, limited_us, inode)
        rate = 100 * inode
        return Connection(inode, "10.0.0.1", "10.0.0.2", counters, 30 + inode, rate)

    looks = Links()
    moments = [
        [seen(1, 1, 1000, 0), seen(2, 0, 0, 0)],
        [seen(1, 5, 41_000, 5000), seen(2, 2, 10_000, 0)],
    ]
    for step, moment in enumerate(moments):
        monkeypatch.setattr(tcp_links, "connections", lambda moment=moment: moment)
        looks.look(10 * step)
    content = looks.content()
    assert content is not None
    assert content["addresses"] == ["10.0.0.1"]
    assert content["peers"] == [
        {
            "local": "10.0.0.1",
            "peer": "10.0.0.2",
            "connections": 2,
            "sent_bytes": 6 * MEGABYTE,
            "busy_us": 50_000,
            "receiver_limited_us": 5000,
            "retransmitted": 0,
            "rtt_us": 31,
            "delivery_bytes_s": 150,  # the median of 100 and 200
        }
    ]


def test_looks_keep_to_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(tcp_links.time, "monotonic", lambda: now[0])

    def slow_look() -> list[Connection]:
        now[0] += 0.5
        return []

    monkeypatch.setattr(tcp_links, "connections", slow_look)
    looks = Links()
    looks.look_if_rested(0)
    looks.look_if_rested(20)  # after a look of 0.5 s: too early, at 0.1% of the time
    assert now[0] == 0.5
    now[0] = 501.0
    looks.look_if_rested(40)
    assert now[0] == 501.5
    looks.look(41)  # where a window ends, it does not matter
    assert now[0] == 502.0


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (struct.pack("=H2s4s", socket.AF_INET, b"\x00\x50", bytes([10, 77, 0, 2])), "10.77.0.2"),
        (struct.pack("=H6x16s", socket.AF_INET6, bytes(15) + b"\x01"), "::1"),
        (
            struct.pack("=H6x16s", socket.AF_INET6, bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 9])),
            "10.0.0.9",
        ),
        (struct.pack("=H", socket.AF_UNIX), None),
        (b"", None),
    ],
)
def test_addresses_are_written_as_people_write_them(raw: bytes, text: str | None) -> None:
    assert address_text(raw) == text


def test_virtual_devices_have_no_speed() -> None:
    assert tcp_links.device_speeds({"127.0.0.1"}) == {}


def test_a_look_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Connection]:
        raise RuntimeError("no counters")

    monkeypatch.setattr(tcp_links, "connections", broken)
    looks = Links()
    looks.look(1)
    looks.look(2)
    assert looks.content() is None
