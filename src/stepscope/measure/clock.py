"""Rounds that tie the ranks' clocks together, over sockets of our own.

Rank 0 opens a port and publishes it in the job's own store; the others connect. In a round every
rank reports its arrival, and rank 0 releases all once the last has arrived: no rank leaves before
every rank has come. An all-reduce of one element would show the same, but needs a process group: a
registered group would shift the names of the script's later groups if one rank gave up, gloo prints
a line into the script's output in some versions of torch, and not all of its waits have a limit.
Nothing outlives the call: no group, no thread, no socket, no hold on the store.

A rank that is dead, late or at another step costs the others no more than about `timeout_s` to meet
and as much again for the rounds. After one broken or two missed meetings, none is tried again.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from stepscope.measure.never_raise import never_raise, note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RUN = "run"  # the label of rounds outside windows
FIRST_MEETING = 100  # the step; each later one comes after ten times as many steps
ROUNDS = 50
TIMEOUT_S = 5.0
MOST_RANKS = 512  # rank 0 holds a descriptor for each; the script needs its own
_MISSES = 2
_MOST_AT_ONCE = 64
_POLL_S = (0.001, 0.05)  # from, to
_HELLO = struct.Struct(">16sI")
_HERE, _GO = b"h", b"g"
# A key in the store is never used twice, even by several sessions in this process.
_uses: Counter[tuple[str, int | None]] = Counter()


def next_meeting(step: int) -> int:
    """The first step, from this one on, at which ranks on several hosts compare their clocks."""
    if not _on_several_hosts():
        return sys.maxsize
    meeting = FIRST_MEETING
    while meeting < step:
        meeting *= 10
    return meeting


def _on_several_hosts() -> bool:
    """Ranks of one host share its clock. A launcher that does not say may have several."""
    local, world = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return local != world or not local


def _attempt() -> str:
    """A launcher that restarts ranks may keep the store, with the ports of those that failed."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(os.environ.get(name, "") for name in names)


class _Missed(Exception):  # noqa: N818 - an outcome, not an error
    """A rank did not come."""


class ClockSync:
    """One rank's side of every synchronisation, and what clock.json will say."""

    def __init__(
        self, *, now: Callable[[], int] = time.time_ns, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._now = now
        self._timeout_s = timeout_s
        self._misses = 0
        self._given_up = False
        self._rank, self._world = 0, 1
        self._syncs: list[dict[str, Any]] = []
        self._notes: list[str] = []

    @never_raise
    def synchronise(
        self, label: str, step: int | None = None, rounds: int = ROUNDS
    ) -> dict[str, Any] | None:
        """Meet the other ranks at this label and step; None when that is not possible.

        Every rank of the default group has to call it with the same labels and steps; the others
        wait for a missing rank no longer than the timeout.
        """
        _uses[label, step] += 1
        store = self._store()
        if self._given_up or store is None:
            return None
        key = f"stepscope/clock/{_attempt()}/{label}/{step}/{_uses[label, step]}"
        marks = self._rounds(_Meeting(store, key, self._rank, self._world, self._timeout_s), rounds)
        if marks is None:
            return None
        result = {
            "label": label,
            "step": step,
            "rounds": marks,
            "clock": "unix_ns",
            "offset_perf_to_unix_ns": _perf_to_unix(self._now),
        }
        self._syncs.append(result)
        return result

    def content(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "rank": self._rank,
            "world_size": self._world,
            "syncs": list(self._syncs),
            "notes": list(self._notes),
        }

    def _store(self) -> Any | None:
        """The job's store, or None without other ranks to meet."""
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return None
        self._rank, self._world = int(dist.get_rank()), int(dist.get_world_size())
        if self._world < 2 or dist.get_backend() == "fake":
            return None
        if self._world > MOST_RANKS:
            self._give_up(f"more than {MOST_RANKS} ranks: clocks are not synchronised")
            return None
        store = dist.distributed_c10d._get_default_store()
        if store is None:
            self._give_up("the default group has no store to meet through")
        return store

    def _rounds(self, meeting: _Meeting, rounds: int) -> list[list[int]] | None:
        try:
            with meeting.held() as peers:
                turn = _lead if self._rank == 0 else _follow
                marks = turn(peers, rounds, self._now, time.monotonic() + self._timeout_s)
        except _Missed as reason:
            self._missed(str(reason))
            return None
        except Exception as error:
            self._give_up(f"broke off: {type(error).__name__}: {error}")
            return None
        self._misses = 0
        return marks

    def _missed(self, reason: str) -> None:
        self._misses += 1
        if self._misses >= _MISSES:
            self._give_up(f"{reason}; not tried again")
        else:
            self._note(reason)

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._note(reason)

    def _note(self, reason: str) -> None:
        self._notes.append(reason)
        note("clock", reason)


class _Meeting:
    """Where the ranks find each other: through the store first, then over sockets.

    They meet in a thread: a call to a store blocks while another thread holds it, and a name
    look-up blocks as long as the resolver likes.
    """

    def __init__(self, store: Any, key: str, rank: int, world: int, timeout_s: float) -> None:
        self._store, self._key = store, key
        self._rank, self._world = rank, world
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._over = False
        self._peers: list[socket.socket] = []
        self._problem: Exception | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[list[socket.socket]]:
        """The connected peers; closed after the block."""
        thread = threading.Thread(target=self._meet, name="stepscope-clock", daemon=True)
        thread.start()
        try:
            thread.join(self._timeout_s + 0.5)
            if self._problem is not None:
                raise self._problem
            if thread.is_alive():
                raise TimeoutError("the job's store did not answer")
            yield self._peers
        finally:
            self._leave()

    def _meet(self) -> None:
        try:
            if self._rank == 0:
                self._invite()
            else:
                self._join()
        except Exception as error:
            self._problem = error

    def _invite(self) -> None:
        """Rank 0: open a port, publish it, wait for all ranks, release them."""
        token = secrets.token_bytes(16)
        with _listener() as server:
            where = {
                "hosts": _hosts(self._store),
                "host": socket.gethostname(),
                "port": server.getsockname()[1],
                "token": token.hex(),
            }
            self._store.set(f"{self._key}/where", json.dumps(where))
            door = _Door(server, token, self._world)
            try:
                self._wait_for_all(door)
            finally:
                door.close()
        for peer in self._peers:
            peer.sendall(_GO)

    def _wait_for_all(self, door: _Door) -> None:
        pause = _Pause()
        while len(self._peers) < self._world - 1:
            came = door.look()
            for peer in came:
                self._keep(peer)
            if came:
                continue
            if self._store.check([f"{self._key}/left"]):
                raise _Missed("a rank did not wait for this one")
            if not pause.until(self._deadline):
                missing = self._world - 1 - len(self._peers)
                raise _Missed(f"{missing} ranks did not come in time")

    def _join(self) -> None:
        """The others: read rank 0's port, connect, wait to be released."""
        pause = _Pause()
        while not self._store.check([f"{self._key}/where"]):
            if not pause.until(self._deadline):
                self._store.set(f"{self._key}/left", "1")
                raise _Missed("rank 0 did not come in time")
        where = json.loads(self._store.get(f"{self._key}/where"))
        peer = _connect(where, self._deadline)
        self._keep(peer)
        peer.sendall(_HELLO.pack(bytes.fromhex(where["token"]), self._rank))
        peer.settimeout(self._left())
        try:
            _receive(peer, 1)
        except (OSError, EOFError) as error:
            raise _Missed("rank 0 called it off: another rank did not come") from error
        peer.settimeout(self._timeout_s)

    def _keep(self, peer: socket.socket) -> None:
        with self._lock:
            if self._over:
                peer.close()
                raise _Missed("too late")
            self._peers.append(peer)
        peer.settimeout(self._timeout_s)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _left(self) -> float:
        return max(0.01, self._deadline - time.monotonic())

    def _leave(self) -> None:
        with self._lock:
            self._over = True
            peers = list(self._peers)
        for peer in peers:
            peer.close()


class _Door:
    """Admits connections that know the token, and waits for none: a stranger that sends nothing, or
    too much, costs the ranks no time, and no more is read from it than a rank would send."""

    def __init__(self, server: socket.socket, token: bytes, world: int) -> None:
        self._server, self._token = server, token
        self._expected = set(range(1, world))
        self._received: dict[socket.socket, bytes] = {}

    def look(self) -> list[socket.socket]:
        """Ranks that have come since the last call."""
        for _ in range(_MOST_AT_ONCE):
            try:
                peer, _ = self._server.accept()
            except OSError:  # no connection waits, or it is gone again
                break
            peer.setblocking(False)
            self._received[peer] = b""
            if len(self._received) > MOST_RANKS:
                self._reject(next(iter(self._received)))
        return [peer for peer in list(self._received) if self._admits(peer)]

    def _admits(self, peer: socket.socket) -> bool:
        try:
            more = peer.recv(_HELLO.size - len(self._received[peer]))
        except BlockingIOError:
            return False
        except OSError:
            more = b""
        self._received[peer] += more
        if more and len(self._received[peer]) < _HELLO.size:
            return False
        if not more or not self._knows(self._received[peer]):
            self._reject(peer)
            return False
        del self._received[peer]
        return True

    def _knows(self, hello: bytes) -> bool:
        token, rank = _HELLO.unpack(hello)
        if not hmac.compare_digest(token, self._token) or rank not in self._expected:
            return False
        self._expected.remove(rank)
        return True

    def _reject(self, peer: socket.socket) -> None:
        del self._received[peer]
        peer.close()

    def close(self) -> None:
        for peer in list(self._received):
            self._reject(peer)


class _Pause:
    """Growing sleeps: quick while the others are near, cheap for the store when they are not."""

    def __init__(self) -> None:
        self._next_s = _POLL_S[0]

    def until(self, deadline: float) -> bool:
        """Sleep a little; False when the time is up."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._next_s, left))
        self._next_s = min(self._next_s * 1.5, _POLL_S[1])
        return True


def _lead(
    peers: Sequence[socket.socket], rounds: int, now: Callable[[], int], deadline: float
) -> list[list[int]]:
    """Rank 0 arrives and leaves in one instant: all others come before it and leave after it."""
    marks = []
    for _ in range(rounds):
        for peer in peers:
            _receive(peer, 1)
        instant = now()
        for peer in peers:
            peer.sendall(_GO)
        marks.append([instant, instant])
        _check(deadline)
    return marks


def _follow(
    peers: Sequence[socket.socket], rounds: int, now: Callable[[], int], deadline: float
) -> list[list[int]]:
    (lead,) = peers
    marks = []
    for _ in range(rounds):
        before = now()
        lead.sendall(_HERE)
        _receive(lead, 1)
        marks.append([before, now()])
        _check(deadline)
    return marks


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the rounds took too long")


def _receive(peer: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes."""
    got = b""
    while len(got) < size:
        more = peer.recv(size - len(got))
        if not more:
            raise EOFError("a rank left")
        got += more
    return got


def _listener() -> socket.socket:
    """A port on every interface: only the others know which one they can reach."""
    try:
        server = socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=MOST_RANKS
        )
    except (OSError, ValueError):
        server = socket.create_server(("", 0), backlog=MOST_RANKS)
    server.setblocking(False)
    return server


def _hosts(store: Any) -> list[str]:
    """Names by which this job has already reached rank 0's machine."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    names = [os.environ.get("MASTER_ADDR"), getattr(store, "host", None), socket.gethostname()]
    return list(dict.fromkeys(name for name in names if name))


def _connect(where: dict[str, Any], deadline: float) -> socket.socket:
    hosts = list(where["hosts"])
    if where["host"] == socket.gethostname():
        hosts.insert(0, "127.0.0.1")
    problem: OSError | None = None
    for host in hosts:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            return socket.create_connection((host, where["port"]), timeout=left)
        except OSError as error:
            problem = error
    raise _Missed(f"rank 0 could not be reached at {', '.join(hosts)}: {problem}")


def _perf_to_unix(now: Callable[[], int]) -> int:
    """What to add to time.perf_counter_ns(), from the least disturbed of five readings."""

    def reading() -> tuple[int, int]:
        before = time.perf_counter_ns()
        unix = now()
        after = time.perf_counter_ns()
        return after - before, unix - (before + after) // 2

    return min(reading() for _ in range(5))[1]
