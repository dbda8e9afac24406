"""Ranks meet through a store and over sockets; strangers and firewalls cost them little."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from clock_crowd import Crowd, Store, check_offsets

from stepscope.measure.cluster import clock_meeting
from stepscope.measure.cluster.clock_meeting import Blocked, Missed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def test_clocks_three_seconds_apart_and_the_next_meeting() -> None:
    crowd = Crowd(Store(), 3).all_meet()
    assert [crowd.held[n].next_step for n in range(3)] == [700, 700, 700]
    assert [crowd.held[n].blocked for n in range(3)] == [None, None, None]
    check_offsets(crowd)


def test_many_hosts_meet_in_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two connections each, 12 hosts are four levels deep."""
    monkeypatch.setattr("stepscope.measure.cluster.clock_meeting.FAN_OUT", 2)
    crowd = Crowd(Store(), 12, timeout_s=20).all_meet()
    assert crowd.problems == {}
    assert {held.next_step for held in crowd.held.values()} == {700}
    check_offsets(crowd)


def test_in_a_tree_a_missing_rank_is_missed_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.measure.cluster.clock_meeting.FAN_OUT", 2)
    crowd = Crowd(Store(), 7, timeout_s=1.0)
    del crowd.threads[6]
    crowd.all_meet()
    assert set(crowd.problems) == set(range(6))
    assert all(isinstance(problem, Missed) for problem in crowd.problems.values())
    assert max(crowd.seconds.values()) < 3


# Firewalls


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port at which a connection gets no answer: its queue is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            knock = stack.enter_context(socket.socket())
            knock.setblocking(False)
            knock.connect_ex(server.getsockname())
        time.sleep(0.05)
        yield server.getsockname()[1]


class WrongPort(Store):
    """Everybody is sent to another port than the one that is open."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def set(self, key: str, value: str) -> None:
        if "/where/" in key:
            hosts = {"hosts": ["127.0.0.1"], "port": self._port}
            value = json.dumps({**json.loads(value), **hosts})
        super().set(key, value)


def test_a_blocked_port_costs_a_second_once_and_the_store_takes_over() -> None:
    with silent_port() as port:
        store = WrongPort(port)
        first = Crowd(store, 3).all_meet()
        assert first.problems == {}
        assert max(first.seconds.values()) < 2.5
        for held in first.held.values():
            assert "could not connect to" in held.blocked
            assert held.next_step == 700
        check_offsets(first)
        second = Crowd(store, 3, key="job/b").all_meet()
    assert max(second.seconds.values()) < 0.9  # nobody tries to connect
    assert len(second.held) == 3
    check_offsets(second)


def test_a_port_that_answers_and_says_nothing_is_blocked_too() -> None:
    """As behind a proxy: the connection is made, nobody reads it."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        crowd = Crowd(WrongPort(server.getsockname()[1]), 2).all_meet()
    assert max(crowd.seconds.values()) < 2.5
    assert all(held.blocked for held in crowd.held.values())
    check_offsets(crowd)


def test_a_stranger_that_answers_in_place_of_rank_0_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            peer, _ = server.accept()
            peer.sendall(b"w" * 16)
            peer.close()

        greeter = threading.Thread(target=greet)
        greeter.start()
        crowd = Crowd(WrongPort(server.getsockname()[1]), 2).all_meet()
        greeter.join()
    assert all("another program answered" in held.blocked for held in crowd.held.values())


def test_many_hosts_do_not_crowd_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_meeting, "MOST_THROUGH_STORE", 2)
    with silent_port() as port:
        crowd = Crowd(WrongPort(port), 3).all_meet()
    assert all(isinstance(problem, Blocked) for problem in crowd.problems.values())
    assert len(crowd.problems) == 3


def test_a_rank_that_is_gone_blocks_nothing() -> None:
    """Rank 0 left and closed its port: no firewall is blamed, and sockets are used again."""
    store = Store()
    Crowd(store, 2, timeout_s=0.2).meet(0)
    late = Crowd(store, 2, timeout_s=0.2)
    late.meet(1)
    assert isinstance(late.problems[1], Missed)
    again = Crowd(store, 2, key="job/b").all_meet()
    assert again.held[1].blocked is None


def test_an_address_that_never_answers_does_not_keep_the_next_from_being_tried() -> None:
    with silent_port() as silent, socket.create_server(("127.0.0.1", 0)) as server:
        targets = {"one": ("127.0.0.1", silent), "two": server.getsockname()}
        asked = []

        def resolve(host: str, _: int) -> list[tuple[int, tuple[str, int]]]:
            asked.append(host)
            return [(socket.AF_INET, targets[host])]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock_meeting, "_resolve", resolve)
            for hosts in (["one", "two"], ["two", "one"]):
                where = {"hosts": hosts, "host": "elsewhere", "port": 1}
                with clock_meeting.connect_any(where, time.monotonic() + 5) as peer:
                    assert peer.getpeername() == server.getsockname()
    assert asked == ["one", "two", "two"]  # a name is looked up only when it is needed


# Strangers


def _says(hello: bytes, *, then_wait: bool = True) -> Callable[[int, bytes], socket.socket]:
    def knock(port: int, token: bytes) -> socket.socket:
        peer = socket.create_connection(("127.0.0.1", port))
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.send(hello.replace(b"TOKEN", token))
        if not then_wait:
            peer.close()
        return peer

    return knock


def _proves(number: int) -> Callable[[int, bytes], socket.socket]:
    def knock(port: int, token: bytes) -> socket.socket:
        proof = clock_meeting._proof(token, b"hello", number)
        return _says(clock_meeting._HELLO.pack(proof, number))(port, token)

    return knock


def _closes_one_side(port: int, token: bytes) -> socket.socket:
    peer = _says(b"")(port, token)
    peer.shutdown(socket.SHUT_WR)
    return peer


def _resets(port: int, token: bytes) -> socket.socket:
    peer = _says(b"garbage")(port, token)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    peer.close()
    return peer


STRANGERS = {
    "says nothing": _says(b""),
    "leaves at once": _says(b"", then_wait=False),
    "closes one side": _closes_one_side,
    "resets the connection": _resets,
    "says a little": _says(b"hello"),
    "knows no token": _says(b"x" * 16 + b"\0\0\0\1"),
    "sends the token itself": _says(b"TOKEN\0\0\0\1"),
    "sends megabytes": _says(b"GET / HTTP/1.1\r\n" * 500_000),
    "is a rank that does not exist": _proves(9),
    "is rank 0 itself": _proves(0),
}


def meet_among(strangers: Callable[[int, bytes], list[socket.socket]], timeout_s: float) -> Crowd:
    """Rank 0 waits; strangers come first, then rank 1."""
    store = Store()
    crowd = Crowd(store, 2, timeout_s)
    crowd.threads[0].start()
    while not store.check(["job/a/where/0"]):
        time.sleep(0.001)
    where = json.loads(store.get("job/a/where/0"))
    peers = strangers(where["port"], bytes.fromhex(where["token"]))
    time.sleep(0.05)
    began = time.monotonic()
    crowd.meet(1)
    crowd.threads[0].join()
    assert time.monotonic() - began < timeout_s / 2
    for peer in peers:
        peer.close()
    return crowd


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_at_the_door_costs_nothing(stranger: str) -> None:
    """Twenty of them come first; the rank that knows the token is let in and nobody else."""
    knock = STRANGERS[stranger]
    crowd = meet_among(lambda port, token: [knock(port, token) for _ in range(20)], 10.0)
    assert [len(crowd.held[n].marks) for n in range(2)] == [5, 5]
    assert crowd.held[1].blocked is None
    check_offsets(crowd)


def test_a_flood_of_strangers_is_thrown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_meeting, "_MOST_STRANGERS", 16)

    def flood(port: int, token: bytes) -> list[socket.socket]:
        return [_says(b"")(port, token) for _ in range(100)]

    crowd = meet_among(flood, 10.0)
    check_offsets(crowd)
    assert crowd.held[1].blocked is None


def test_strangers_alone_are_no_ranks() -> None:
    store = Store()
    crowd = Crowd(store, 2, timeout_s=0.5)
    crowd.meet(0)
    assert "1 ranks did not connect" in str(crowd.problems[0])
    where = json.loads(store.get("job/a/where/0"))
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", where["port"]))
