"""How ranks find each other to compare clocks, who meets, and the rounds that tie the clocks
together: over sockets, else through the job's store.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from stepscope.records.folders import this_process

Marks = list[list[int]]

# Rank 0 opens a port and publishes it in the job's own store; the others connect. In a job of many
# hosts those who connected first accept the next ones. A rank that cannot connect says so in the
# store: everybody then uses the store itself, now and in every later meeting.
#
# An all-reduce of one element would show the same as a round, but needs a process group: a
# registered group would shift the names of the script's later groups if one rank gave up, gloo
# prints a line into the script's output in some versions of torch, and not all of its waits have a
# limit. Nothing outlives a meeting: no group, no socket, no hold on the store.

CONNECT_S = 1.0  # for an answer, from all addresses together
MOST_THROUGH_STORE = 64  # ranks
_PATIENCE_S = 0.2  # with one address before the next is tried too
_MOST_AT_ONCE = 64
_MOST_STRANGERS = 512
_PROOF_BYTES = 16
_HELLO = struct.Struct(f">{_PROOF_BYTES}sI")  # proof, index
_RELEASE = struct.Struct(">Q")  # the step of the next meeting


class Blocked(Exception):  # noqa: N818 - an outcome, not an error
    """A rank cannot connect to another one."""


class MeetingResult(NamedTuple):
    """A meeting that took place. `blocked` says why it was held through the store."""

    marks: Marks
    next_step: int
    blocked: str | None = None


class Meeting:
    """One rank's side of one meeting. `prefix` begins the keys of the job, `key` of the meeting."""

    def __init__(
        self, store: Any, prefix: str, key: str, place: MeetingPlace, timeout_s: float
    ) -> None:
        self._store, self._prefix, self._key = store, prefix, key
        self._place = place
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def hold(
        self, rounds: int, now: Callable[[], int], next_step: int, next_stage: Callable[[], None]
    ) -> MeetingResult:
        """Raises Missed or Blocked; any other error means that a rank left in mid-meeting.

        `next_step` is rank 0's proposal; all get the same one. `next_stage` is called whenever the
        timeout begins anew.
        """
        if not self._is_set(f"{self._prefix}/blocked"):
            with contextlib.suppress(Blocked), contextlib.ExitStack() as sockets:
                parent, children = self._connect_all(sockets)
                next_step = self._release(parent, children, next_step)
                next_stage()
                deadline = time.monotonic() + self._timeout_s
                return MeetingResult(
                    rounds_over_sockets(parent, children, rounds, now, deadline), next_step
                )
        next_stage()
        return self._hold_through_store(now, next_step)

    def _hold_through_store(self, now: Callable[[], int], next_step: int) -> MeetingResult:
        blocked = self._read(f"{self._prefix}/blocked")
        if self._place.size > MOST_THROUGH_STORE:
            raise Blocked(blocked)
        if self._place.number == 0:
            self._store.set(f"{self._key}/next", str(next_step))
        deadline = time.monotonic() + self._timeout_s
        marks = rounds_through_store(self._store, f"{self._key}/round", self._place, now, deadline)
        return MeetingResult(marks, int(self._read(f"{self._key}/next")), blocked)

    # Over sockets.

    def _connect_all(
        self, sockets: contextlib.ExitStack
    ) -> tuple[socket.socket | None, list[socket.socket]]:
        children: list[socket.socket] = []
        if self._place.children:
            self._admit_children(sockets, children)
        parent = None
        if self._place.parent is not None:
            where = self._find_parent(self._place.parent)
            parent = sockets.enter_context(self._connect(where))
        for peer in (*children, *([] if parent is None else [parent])):
            peer.settimeout(self._timeout_s)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return parent, children

    def _admit_children(self, sockets: contextlib.ExitStack, children: list[socket.socket]) -> None:
        """Open a port, publish it, wait for all children."""
        token = secrets.token_bytes(16)
        with (
            open_listener() as server,
            contextlib.closing(Door(server, token, self._place.children)) as door,
        ):
            where = {
                "hosts": own_addresses(self._store, is_root=self._place.number == 0),
                "host": socket.gethostname(),
                "port": server.getsockname()[1],
                "token": token.hex(),
            }
            self._store.set(f"{self._key}/where/{self._place.number}", json.dumps(where))
            try:
                self._wait_for_children(sockets, door, children)
            except Missed:
                # Whoever comes now finds the port closed, but by no firewall.
                self._store.set(f"{self._key}/left", "1")
                raise

    def _wait_for_children(
        self, sockets: contextlib.ExitStack, door: Door, children: list[socket.socket]
    ) -> None:
        pause = Pause(self._deadline)
        while len(children) < len(self._place.children):
            came = door.look()
            children += [sockets.enter_context(peer) for peer in came]
            if came:
                continue
            self._raise_if_over()
            if not pause.sleep():
                missing = len(self._place.children) - len(children)
                raise Missed(f"{missing} ranks did not connect in time")

    def _raise_if_over(self) -> None:
        if self._is_set(f"{self._prefix}/blocked"):
            raise Blocked
        if self._is_set(f"{self._key}/left"):
            raise Missed("a rank did not wait for this one")

    def _find_parent(self, parent: int) -> dict[str, Any]:
        key = f"{self._key}/where/{parent}"
        pause = Pause(self._deadline, self._place.size)
        while not self._is_set(key):
            self._raise_if_over()
            if not pause.sleep():
                self._store.set(f"{self._key}/left", "1")
                raise Missed("rank 0 did not answer in time")
        where: dict[str, Any] = json.loads(self._read(key))
        return where

    def _connect(self, where: dict[str, Any]) -> socket.socket:
        """Connect to the parent and prove each other's knowledge of the token."""
        token, index = bytes.fromhex(where["token"]), self._place.number
        try:
            peer = connect_any(where, time.monotonic() + CONNECT_S)
            try:
                peer.settimeout(CONNECT_S)
                peer.sendall(_HELLO.pack(_proof(token, b"hello", index), index))
                answer = receive(peer, _PROOF_BYTES)
                if not hmac.compare_digest(answer, _proof(token, b"welcome", index)):
                    raise OSError("another program answered")
            except BaseException:
                peer.close()
                raise
        except (OSError, EOFError) as error:
            if self._is_set(f"{self._key}/left"):
                raise Missed("another rank did not connect") from error
            places = ", ".join(where["hosts"])
            text = f"{os.uname().nodename} could not connect to {where['host']} ({places}): {error}"
            self._store.set(f"{self._prefix}/blocked", text)
            raise Blocked from error
        return peer

    def _release(
        self, parent: socket.socket | None, children: list[socket.socket], next_step: int
    ) -> int:
        """All have come: pass on what rank 0 says."""
        if parent is not None:
            parent.settimeout(max(0.01, self._deadline - time.monotonic()))
            try:
                (next_step,) = _RELEASE.unpack(receive(parent, _RELEASE.size))
            except (OSError, EOFError) as error:
                if self._is_set(f"{self._prefix}/blocked"):
                    raise Blocked from error
                raise Missed("rank 0 gave up: another rank did not connect") from error
            parent.settimeout(self._timeout_s)
        for child in children:
            child.sendall(_RELEASE.pack(next_step))
        return next_step

    # The store: keys are read only once they exist.

    def _is_set(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _read(self, key: str) -> str:
        text = self._store.get(key)
        return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


class Door:
    """Admits connections that know the token, and waits for none: a stranger that sends nothing, or
    too much, costs the ranks no time, and no more is read from it than a rank would send."""

    def __init__(self, server: socket.socket, token: bytes, expected: range) -> None:
        self._server, self._token = server, token
        self._expected = set(expected)
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
            if len(self._received) > _MOST_STRANGERS:
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
        if not more or not self._welcomes(peer, self._received[peer]):
            self._reject(peer)
            return False
        del self._received[peer]
        return True

    def _welcomes(self, peer: socket.socket, hello: bytes) -> bool:
        proof, index = _HELLO.unpack(hello)
        known = hmac.compare_digest(proof, _proof(self._token, b"hello", index))
        if not known or index not in self._expected:
            return False
        try:
            sent = peer.send(_proof(self._token, b"welcome", index))
        except OSError:
            return False
        if sent == _PROOF_BYTES:
            self._expected.remove(index)
        return sent == _PROOF_BYTES

    def _reject(self, peer: socket.socket) -> None:
        del self._received[peer]
        peer.close()

    def close(self) -> None:
        for peer in list(self._received):
            self._reject(peer)


def _proof(token: bytes, word: bytes, index: int) -> bytes:
    """The token itself never travels: whoever answers at an address may be a stranger."""
    return hmac.digest(token, word + index.to_bytes(4, "big"), "sha256")[:_PROOF_BYTES]


def open_listener() -> socket.socket:
    """A port on every interface: only the others know which one they can reach."""
    backlog = 2 * FAN_OUT
    try:
        server = socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    except (OSError, ValueError):
        server = socket.create_server(("", 0), backlog=backlog)
    server.setblocking(False)
    return server


def own_addresses(store: Any, *, is_root: bool) -> list[str]:
    """Names by which the job has already reached rank 0's host; of another host, its address on
    the way to that one."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    masters = [os.environ.get("MASTER_ADDR"), getattr(store, "host", None)]
    known = [master for master in masters if master]
    names = known if is_root else [address for name in known for address in _address_towards(name)]
    return list(dict.fromkeys([*names, socket.gethostname()]))


def _address_towards(host: str) -> list[str]:
    """This host's address on the route to another one; no packet is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return [str(probe.getsockname()[0])]
    except (OSError, UnicodeError):
        return []


def connect_any(where: dict[str, Any], deadline: float) -> socket.socket:
    """Connect to the first address that answers. Each may be one that never does, so the next one
    is tried while those before it are still open; a look-up may take long, so only when needed."""
    hosts = list(where["hosts"])
    if where["host"] == socket.gethostname():
        hosts.insert(0, "127.0.0.1")
    with _Attempts() as attempts:
        for place, host in enumerate(hosts):
            for family, target in _resolve(host, int(where["port"])):
                attempts.add(family, target)
            is_last = place == len(hosts) - 1
            until = deadline if is_last else min(deadline, time.monotonic() + _PATIENCE_S)
            peer = attempts.wait(until)
            if peer is not None:
                return peer
        raise attempts.problem


class _Attempts:
    """Connections that are being made, all at once."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._ready = self._open.enter_context(selectors.DefaultSelector())
        self._tried: set[Any] = set()
        self.problem: OSError = TimeoutError("no answer")

    def __enter__(self) -> _Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, family: int, target: Any) -> None:
        if target in self._tried:
            return
        self._tried.add(target)
        peer = self._open.enter_context(socket.socket(family, socket.SOCK_STREAM))
        peer.setblocking(False)
        code = peer.connect_ex(target)
        if code in (0, errno.EINPROGRESS):
            self._ready.register(peer, selectors.EVENT_WRITE)
        else:
            self.problem = OSError(code, os.strerror(code))

    def wait(self, until: float) -> socket.socket | None:
        """The first that is connected; None when the time is up or all have failed."""
        while self._ready.get_map():
            answers = self._ready.select(max(0.0, until - time.monotonic()))
            if not answers:
                return None
            for key, _ in answers:
                peer: Any = key.fileobj
                self._ready.unregister(peer)
                code = peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not code:
                    connected: socket.socket = peer.dup()
                    return connected
                self.problem = OSError(code, os.strerror(code))
        return None


def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [(family, target) for family, _, _, _, target in found]


# Who meets when clocks are compared: every rank of a small job, one rank per host of a large one.
#
# Ranks of one host share its clock. In a large job a rank stands for its host: local rank 0 where
# the launcher numbers them, else the first of the host to sign up in the job's store. Those who do
# not meet ask the store once at most. The ones who meet form a tree, so that nobody holds more than
# `FAN_OUT` connections.

ALL_MEET = 64  # ranks; in a larger job one rank per host meets
FAN_OUT = 64
MOST_HOSTS = FAN_OUT + FAN_OUT**2  # a tree of two levels
_POLL_S = (0.001, 0.05)  # from, to
_POLLS_PER_S = 20_000  # that the store may get from all ranks together


class Missed(Exception):  # noqa: N818 - an outcome, not an error
    """A rank did not come."""


class MeetingPlace(NamedTuple):
    """A rank's number among those who meet, and how many they are; 0 is rank 0."""

    number: int
    size: int

    @property
    def parent(self) -> int | None:
        return (self.number - 1) // FAN_OUT if self.number else None

    @property
    def children(self) -> range:
        first = self.number * FAN_OUT + 1
        return range(first, max(first, min(first + FAN_OUT, self.size)))


class Pause:
    """Growing sleeps: quick while the others are near, cheap for the store when they are not."""

    def __init__(self, deadline: float, ranks: int = 1) -> None:
        self._deadline = deadline
        self._next_s = _POLL_S[0]
        self._longest_s = max(_POLL_S[1], ranks / _POLLS_PER_S)

    def sleep(self) -> bool:
        """Sleep a little; False when the time is up."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._next_s, left))
        self._next_s = min(self._next_s * 1.5, self._longest_s)
        return True


def is_on_several_hosts() -> bool:
    """A launcher that does not say may have started ranks on several."""
    local, world = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return local != world or not local


def local_place(world: int, environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """This rank's number on its host, and how many ranks the host has; None if nobody says."""
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    try:
        rank, size, all_ranks = (int(environ[name]) for name in names)
    except (KeyError, ValueError):
        return None
    return (rank, size) if all_ranks == world and 0 <= rank < size <= world else None


def find_place(
    store: Any, prefix: str, rank: int, world: int, deadline: float
) -> MeetingPlace | None:
    """None for a rank whose host is represented by another one."""
    if world <= ALL_MEET:
        return MeetingPlace(rank, world)
    index = _sign_up(store, prefix, rank, local_place(world))
    if index is None:
        return None
    pause = Pause(deadline, world)
    if index == 0:
        while (signed := int(store.add(f"{prefix}/ranks", 0))) != world:
            if not pause.sleep():
                raise Missed(f"only {signed} of {world} ranks registered in time")
        count = 1 + int(store.add(f"{prefix}/hosts", 0))
        store.set(f"{prefix}/count", str(count))
        return MeetingPlace(0, count)
    while not store.check([f"{prefix}/count"]):
        if not pause.sleep():
            raise Missed("not all ranks of the job registered in time")
    return MeetingPlace(index, int(store.get(f"{prefix}/count")))


def _sign_up(store: Any, prefix: str, rank: int, local: tuple[int, int] | None) -> int | None:
    """Count the host before its ranks: once all ranks are counted, so are all hosts."""
    if local is not None and local[0] and rank:
        return None
    stands_for = 1 if local is None else 0 if local[0] else local[1]
    first = local is not None or int(store.add(f"{prefix}/on/{_this_host()}", 1)) == 1
    index = 0 if rank == 0 else int(store.add(f"{prefix}/hosts", 1)) if first else None
    store.add(f"{prefix}/ranks", stands_for)
    return index


def _this_host() -> str:
    """Hosts may share a name, and containers of one host have several."""
    process = this_process()
    return f"{process.host}/{process.boot or ''}"


# Rounds that tie clocks together: no rank leaves one before every rank has come.
#
# Over sockets the ranks form a tree: arrivals travel up to rank 0, which arrives and leaves in one
# instant, and the release travels down. Through the job's store the same takes longer, so the
# clocks are known less precisely.

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

    def rest() -> None:
        if time.monotonic() > deadline:
            raise Missed("a rank did not answer through the job's store")
        time.sleep(_STORE_POLL_S)

    marks = []
    for number in range(1, STORE_ROUNDS + 1):
        release = f"{key}/{number}"
        if place.number:
            came = now()
            store.add(f"{key}/came", 1)
            while not store.check([release]):
                rest()
            marks.append([came, now()])
        else:
            while int(store.add(f"{key}/came", 0)) < number * (place.size - 1):
                rest()
            instant = now()
            store.set(release, "1")
            marks.append([instant, instant])
    return marks
