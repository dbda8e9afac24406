"""Rounds that tie clocks together: no rank leaves one before every rank has come.

Over sockets the ranks form a tree: arrivals travel up to rank 0, which arrives and leaves in one
instant, and the release travels down. Through the job's store the same takes longer, so the clocks
are known less precisely.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from stepscope.measure.clock_place import Missed

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from stepscope.measure.clock_place import MeetingPlace

    Marks = list[list[int]]  # came, left

STORE_ROUNDS = 10
_HERE, _GO = b"h", b"g"
_STORE_POLL_S = 0.0001


def rounds_over_sockets(
    parent: socket.socket | None,
    children: Sequence[socket.socket],
    rounds: int,
    now: Callable[[], int],
    deadline: float,
) -> Marks:
    marks = []
    for _ in range(rounds):
        for child in children:
            receive(child, 1)
        came = left = now()
        if parent is not None:
            parent.sendall(_HERE)
            receive(parent, 1)
            left = now()
        for child in children:
            child.sendall(_GO)
        marks.append([came, left])
        if time.monotonic() > deadline:
            raise TimeoutError("the rounds took too long")
    return marks


def receive(peer: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes."""
    got = b""
    while len(got) < size:
        more = peer.recv(size - len(got))
        if not more:
            raise EOFError("a rank left")
        got += more
    return got


def rounds_through_store(
    store: Any, key: str, place: MeetingPlace, now: Callable[[], int], deadline: float
) -> Marks:
    """Keys are read only once they exist: nothing waits inside the store."""
    turn = _follow_in_store if place.number else _lead_in_store
    return [
        turn(store, key, number, number * (place.size - 1), now, deadline)
        for number in range(1, STORE_ROUNDS + 1)
    ]


def _lead_in_store(
    store: Any, key: str, number: int, arrivals: int, now: Callable[[], int], deadline: float
) -> list[int]:
    _wait_until(lambda: int(store.add(f"{key}/came", 0)) >= arrivals, deadline)
    instant = now()
    store.set(f"{key}/{number}", "1")
    return [instant, instant]


def _follow_in_store(
    store: Any, key: str, number: int, arrivals: int, now: Callable[[], int], deadline: float
) -> list[int]:
    del arrivals
    came = now()
    store.add(f"{key}/came", 1)
    _wait_until(lambda: bool(store.check([f"{key}/{number}"])), deadline)
    return [came, now()]


def _wait_until(is_so: Callable[[], bool], deadline: float) -> None:
    while not is_so():
        if time.monotonic() > deadline:
            raise Missed("a rank did not answer through the job's store")
        time.sleep(_STORE_POLL_S)
