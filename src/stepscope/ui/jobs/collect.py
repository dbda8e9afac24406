"""Send the parts of hosts without a shared disk to the first host's `stepscope run` (--collect).

Both sides share a token; each message carries proof of it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import StepscopeError
from stepscope.measure import folder as layout
from stepscope.measure.cluster.clock_meeting import connect_any, open_listener
from stepscope.records.folders import COLLECTOR, HOSTS
from stepscope.text.figures import size
from stepscope.text.words import counted
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.files import open_file, read_whole
from stepscope.trace.run_folder.rank_facts import folder_rank, read_facts
from stepscope.trace.run_folder.run_state import read_host_runs
from stepscope.trace.run_folder.windows import window_number
from stepscope.ui.jobs.gather_parts import host_file, is_needed, is_safe
from stepscope.ui.say import say

# Messages between two `stepscope run`s that share a token: each carries proof of it.
#
# The server speaks first, with a random number; the client answers with another. Every frame has an
# HMAC over both numbers, its direction, its place and its content, so nothing can be forged,
# replayed or reordered. The token itself never travels here: the job's own store has carried it to
# the other hosts (measure/cluster/collector_address.py), so it keeps out everybody who cannot
# read that store.

PIECE_BYTES = 1 << 20
MOST_HELLO_BYTES = 4096
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HEAD = struct.Struct(f">I{_PROOF_BYTES}s")


class StrangerError(Exception):
    """The other side does not know the token, or does not keep to the protocol."""


class Channel:
    """One end of a connection, with a time by which all must be over."""

    def __init__(self, peer: socket.socket, token: str, *, is_server: bool, limit_s: float) -> None:
        self._peer, self._key = peer, token.encode()
        self._deadline = time.monotonic() + limit_s
        self._own, self._other = (b"S", b"C") if is_server else (b"C", b"S")
        self._sent = self._received = 0
        own = secrets.token_bytes(_NONCE_BYTES)
        if is_server:
            self._send_all(own)
            self._nonces = own + self._receive(_NONCE_BYTES)
        else:
            self._nonces = self._receive(_NONCE_BYTES) + own
            self._send_all(own)

    def extend(self, limit_s: float) -> None:
        """The other side has proved itself: it may take longer."""
        self._deadline = time.monotonic() + limit_s

    def send(self, content: bytes) -> None:
        proof = self._proof(self._own, self._sent, content)
        self._sent += 1
        self._send_all(_HEAD.pack(len(content), proof) + content)

    def send_json(self, value: Any) -> None:
        self.send(json.dumps(value).encode())

    def receive(self, most_bytes: int = PIECE_BYTES) -> bytes:
        size, proof = _HEAD.unpack(self._receive(_HEAD.size))
        if size > most_bytes:
            raise StrangerError(f"a message of {size} bytes")
        content = self._receive(size)
        if not hmac.compare_digest(proof, self._proof(self._other, self._received, content)):
            raise StrangerError("a message with a wrong token")
        self._received += 1
        return content

    def receive_json(self, most_bytes: int = MOST_HELLO_BYTES) -> dict[str, Any]:
        value = json.loads(self.receive(most_bytes))
        if not isinstance(value, dict):
            raise StrangerError("a message that is not a JSON object")
        return value

    def _proof(self, direction: bytes, place: int, content: bytes) -> bytes:
        start = self._nonces + direction + place.to_bytes(8, "big")
        return hmac.digest(self._key, start + content, "sha256")

    def _send_all(self, data: bytes) -> None:
        self._peer.settimeout(self._left_s())
        self._peer.sendall(data)

    def _receive(self, size: int) -> bytes:
        pieces, left = [], size
        while left:
            self._peer.settimeout(self._left_s())
            piece = self._peer.recv(min(left, PIECE_BYTES))
            if not piece:
                raise EOFError("the connection was closed")
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def _left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        return left


# --collect: hosts without a shared disk send their parts to the first host's `stepscope run`.
#
# Every `run` opens a port before its command starts, and looks at it only when the command has
# ended: what strangers send until then stays in the kernel, and is dropped. The `run` whose folder
# has rank 0 receives; every other one that a rank told where that is sends. Nothing is ever
# overwritten.

MOST_FILE_BYTES = 8 << 20
MOST_HOST_BYTES = 64 << 20
_MOST_BYTES = 4 << 30  # from all hosts
_MOST_FILES = 100_000  # of one host
_HELLO_S = 3.0  # for a connection to prove that it knows the token
_TRANSFER_S = 60.0
_CONNECT_S = 5.0
_WAIT_S = 10.0  # for hosts that have not come
_POLL_S = 0.1
_MOST_CONNECTIONS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}(/[A-Za-z0-9][A-Za-z0-9._-]{0,200})?")
_FAILURES = (OSError, EOFError, ValueError, StrangerError)


class FirstHost(msgspec.Struct, frozen=True, kw_only=True):
    """Where the first host's `run` listens, as its rank 0 published it."""

    hosts: list[str]  # addresses
    host: str
    port: int
    token: str


class PartCollector:
    """This host's end of --collect, from before the command starts."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._token = secrets.token_hex(32)
        self._receiver: Receiver | None = None

    @classmethod
    def listen(cls) -> PartCollector | None:
        """None, and a word about it, if no port can be opened."""
        try:
            return cls(open_listener())
        except OSError as error:
            say(f"--collect: no port can be opened: {layout.why_refused(error)}")
            return None

    @property
    def settings(self) -> dict[str, Any]:
        """For the ranks of this host."""
        return {"collect_port": self._server.getsockname()[1], "collect_token": self._token}

    def command_ended(self, run: Path) -> bool:
        """Send this host's part, or begin to receive those of others; True if it was sent."""
        where = run / HOSTS / COLLECTOR
        if any(run.glob("rank-00000*")):
            self._receiver = Receiver(self._server, self._token, run)
            self._receiver.start()
            return False
        self._server.close()
        try:
            first = decode(read_whole(where, MOST_HELLO_BYTES), FirstHost)
        except (StepscopeError, NotJsonError):
            say(
                "--collect: no rank on this host learned the first host's address, so this host's "
                f"files stay in {run}"
            )
            return False
        finally:
            layout.remove(where)
        return _send_and_say(run, first)

    def finish(self) -> None:
        """Wait for hosts that have not come, a few seconds; then nobody can come any more."""
        if self._receiver is not None:
            self._receiver.finish()
        self._server.close()


# The first host.


class Receiver:
    """Takes what other hosts send into a run folder."""

    def __init__(self, server: socket.socket, token: str, run: Path) -> None:
        self._server, self._token, self._run = server, token, run
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._over = False
        self._connections = 0
        self._transfers = 0  # of hosts that proved themselves, and go on
        self._taken_bytes = 0
        self.hosts: list[str] = []
        self.files = 0

    def start(self) -> None:
        threading.Thread(target=self._accept, name="stepscope-collect", daemon=True).start()

    def finish(self) -> None:
        world = max((_world_size(rank) for rank in self._run.glob("rank-00000*")), default=1)
        until = self._began + _WAIT_S
        while self._waits(until, world):
            time.sleep(_POLL_S)
        with self._lock:  # a file that is being written is counted first
            self._over = True
        if self.hosts:
            received = f"{counted(self.files, 'file')} ({size(self._taken_bytes)})"
            hosts = ", ".join(self.hosts[:4]) + (", ..." if len(self.hosts) > 4 else "")
            say(f"received {received} from {counted(len(self.hosts), 'other host')}: {hosts}")

    def _waits(self, until: float, world: int) -> bool:
        with self._lock:
            transfers = self._transfers
        now = time.monotonic()
        if transfers:
            return now < until + _TRANSFER_S
        return now < until and not self._is_complete(world)

    def _is_complete(self, world: int) -> bool:
        return len({folder_rank(folder) for folder in self._run.glob("rank-*")}) >= world

    def _accept(self) -> None:
        self._server.setblocking(False)
        while not self._over:
            try:
                peer, _ = self._server.accept()
            except BlockingIOError:
                time.sleep(_POLL_S)
                continue
            except OSError:
                return  # closed
            with self._lock:
                is_full = self._connections >= _MOST_CONNECTIONS
                self._connections += not is_full
            if is_full:
                peer.close()
                continue
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        """One connection; a stranger gets a random number and is cut off."""
        try:
            with contextlib.suppress(*_FAILURES), peer:
                channel = Channel(peer, self._token, is_server=True, limit_s=_HELLO_S)
                host = str(channel.receive_json().get("host"))[:64]
                channel.extend(_TRANSFER_S)
                with self._lock:
                    self._transfers += 1
                try:
                    self._take_files(channel, host)
                finally:
                    with self._lock:
                        self._transfers -= 1
        finally:
            with self._lock:
                self._connections -= 1

    def _take_files(self, channel: Channel, host: str) -> None:
        channel.send_json({"welcome": True})
        folder = _OwnFolders(self._run)
        left, taken = MOST_HOST_BYTES, 0
        for _ in range(_MOST_FILES):
            about = channel.receive_json()
            if about.get("end"):
                break
            name, length = str(about.get("file")), int(about.get("size_bytes", -1))
            if not 0 <= length <= min(MOST_FILE_BYTES, left):
                raise StrangerError("a file larger than the limit")
            left -= length
            taken += self._take(channel, folder, name, length)
        with self._lock:
            self.hosts.append(host)
            self.files += taken
        channel.send_json({"files": taken})

    def _take(self, channel: Channel, folder: _OwnFolders, name: str, length: int) -> bool:
        content = bytearray()
        while len(content) < length:
            content += channel.receive(min(PIECE_BYTES, length - len(content)))
        with self._lock:
            if self._over or self._taken_bytes + length > _MOST_BYTES:
                raise StrangerError("more files than the limit")
            self._taken_bytes += length
            return folder.write(name, bytes(content))


class _OwnFolders:
    """Folders of ranks that this connection may write to: those that it made."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._made: set[str] = set()

    def write(self, name: str, content: bytes) -> bool:
        """False for a name that a part of a run cannot have, or that something else has."""
        folder, slash, _ = name.partition("/")
        if not _NAME.fullmatch(name) or not is_safe(name) or not is_needed(name) or not slash:
            return False
        if folder != HOSTS and folder not in self._made:
            try:
                (self._run / folder).mkdir()
            except FileExistsError:
                return False
            self._made.add(folder)
        (self._run / HOSTS).mkdir(exist_ok=True)
        return _write_new(self._run / name, content)


def _write_new(path: Path, content: bytes) -> bool:
    """Whole, and never over another file."""
    unfinished = layout.temporary(path)
    try:
        unfinished.write_bytes(content)
        os.link(unfinished, path)
    except FileExistsError:
        return False
    except OSError:  # a disk without links
        if path.exists():
            return False
        unfinished.replace(path)
    finally:
        layout.remove(unfinished)
    return True


def _world_size(rank: Path) -> int:
    return int(read_facts(rank).get("world_size") or 1)


# The other hosts.


def _send_and_say(run: Path, first: FirstHost) -> bool:
    try:
        sent, left_out = send_part(run, first)
    except _FAILURES as error:
        why = str(error) or type(error).__name__
        say(
            f"--collect: {first.host} could not be reached ({why}), so this host's files stay in "
            f"{run}"
        )
        return False
    words = f"sent {counted(sent, 'file')} of this host to {first.host}"
    if left_out:
        named = ", ".join(left_out[:4]) + (", ..." if len(left_out) > 4 else "")
        words += f"; too large, and still in {run}: {named}"
    say(f"{words}; the first host explains the run")
    return True


def send_part(run: Path, first: FirstHost) -> tuple[int, list[str]]:
    """How many files arrived, and the names of those that are too large."""
    peer = connect_any(msgspec.to_builtins(first), time.monotonic() + _CONNECT_S)
    with peer:
        channel = Channel(peer, first.token, is_server=False, limit_s=_CONNECT_S)
        channel.send_json({"host": os.uname().nodename})
        channel.receive_json()
        channel.extend(_TRANSFER_S)
        left, left_out = MOST_HOST_BYTES, []
        for name, length in _parts(run):
            if length > min(MOST_FILE_BYTES, left):
                left_out.append(name)
                continue
            left -= length
            _send_file(channel, run / name, name, length)
        # Last: whoever waits for this host's file finds everything else there.
        for name, content in _host_files(run):
            _send(channel, name, content)
        channel.send_json({"end": True})
        return int(channel.receive_json().get("files", 0)), left_out


def _parts(run: Path) -> Iterator[tuple[str, int]]:
    """Files of ranks by name and size: traces last, for they are large."""
    files = [
        (file.relative_to(run).as_posix(), file.stat().st_size)
        for folder in sorted(run.glob("rank-*"))
        for file in sorted(folder.iterdir())
        if file.is_file()
    ]
    wanted = [(name, length) for name, length in files if is_needed(name)]
    yield from sorted(wanted, key=lambda part: window_number(Path(part[0]).name) is not None)


def _host_files(run: Path) -> Iterator[tuple[str, bytes]]:
    if not read_host_runs(run):
        own = host_file(run)
        if own is not None:
            yield own[0], json.dumps(own[1]).encode()
        return
    for file in sorted((run / HOSTS).glob("[!.]*.json")):
        yield f"{HOSTS}/{file.name}", read_whole(file)


def _send_file(channel: Channel, file: Path, name: str, length: int) -> None:
    with open_file(file) as opened:
        content = opened.read(length)
    _send(channel, name, content)


def _send(channel: Channel, name: str, content: bytes) -> None:
    channel.send_json({"file": name, "size_bytes": len(content)})
    for start in range(0, len(content), PIECE_BYTES):
        channel.send(content[start : start + PIECE_BYTES])
