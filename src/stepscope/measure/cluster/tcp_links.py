"""How fast this rank's TCP connections send, by the counters that Linux keeps for each of them.

Nothing is sent and no socket is opened, duplicated or changed: a look reads the kernel's counters
of descriptors that exist (`getsockopt`, TCP_INFO). Gloo and NCCL over sockets show up in them;
InfiniBand and shared memory do not. What was sent before the first look does not count.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections import deque
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from stepscope.measure.never_raise import never_raise

MOST_DESCRIPTORS = 4096
LONGEST_S = 0.02  # of a look
BUDGET = 0.001  # of the time, for looks in the background
LEAST_BYTES = 1 << 20  # sent by a connection: less is answered by latency, not by the link's rate
_MOST_SAMPLES = 64
_TCP_INFO, _ESTABLISHED = 11, 1
_INFO_BYTES, _ADDRESS_BYTES = 256, 128
_U32, _U64, _LENGTH = struct.Struct("=I"), struct.Struct("=Q"), ctypes.c_uint32
# Offsets in the kernel's struct tcp_info.
_RETRANSMITTED, _SENT, _RTT, _DELIVERY, _BUSY, _RECEIVER_LIMITED = 100, 120, 148, 160, 168, 176
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address written as an IPv6 one
_NO_RTT = (1 << 32) - 1
_SIOCGIFADDR = 0x8915
_DEVICES = Path("/sys/class/net")


class Counters(NamedTuple):
    """Since the connection was opened."""

    sent_bytes: int = 0  # and acknowledged
    busy_us: int = 0  # something was waiting to be sent or acknowledged
    receiver_limited_us: int = 0  # of that, the receiver had no room
    retransmitted: int = 0  # segments


class Connection(NamedTuple):
    """One established TCP connection of this process."""

    inode: int
    local: str
    peer: str
    counters: Counters
    rtt_us: int | None  # the shortest round trip
    delivery_bytes_s: int  # acknowledged of late, over the time that this took


class _Seen:
    """One connection over all looks."""

    def __init__(self, connection: Connection, *, opened: bool) -> None:
        self.connection = connection
        self.before = Counters() if opened else connection.counters
        self.delivery: deque[int] = deque(maxlen=_MOST_SAMPLES)

    def again(self, connection: Connection) -> None:
        if connection.counters.sent_bytes > self.connection.counters.sent_bytes:
            self.delivery.append(connection.delivery_bytes_s)
        self.connection = connection

    def sent(self) -> Counters:
        now = self.connection.counters
        return Counters(*(here - then for here, then in zip(now, self.before, strict=True)))


class Links:
    """Looks at the process's connections, and adds up what each has sent since the first look."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._seen: dict[int, _Seen] = {}
        self._rest_until = 0.0
        self._lock = threading.Lock()

    @never_raise
    def look_if_rested(self, step: int) -> None:
        """In the writer's thread: unless looks take too much of the time."""
        if time.monotonic() >= self._rest_until:
            self.look(step)

    @never_raise
    def look(self, step: int) -> None:
        began = time.monotonic()
        try:
            with self._lock:
                for connection in connections():
                    seen = self._seen.get(connection.inode)
                    if seen is None:
                        self._seen[connection.inode] = _Seen(connection, opened=bool(self._steps))
                    else:
                        seen.again(connection)
                self._steps = [*self._steps[:1], step]
        finally:
            ended = time.monotonic()
            self._rest_until = ended + (ended - began) / BUDGET

    def content(self) -> dict[str, Any] | None:
        """links.json; None until two looks have seen a connection."""
        if len(self._steps) < 2 or not self._seen:
            return None
        addresses = {seen.connection.local for seen in self._seen.values()}
        return {
            "schema": 1,
            "steps": self._steps,
            "addresses": sorted(filter(_is_outward, addresses)),
            "device_mbit_s": device_speeds(addresses),
            "peers": self._peers(),
        }

    def _peers(self) -> list[dict[str, Any]]:
        """One row for each pair of addresses, over its connections that sent enough."""
        pairs: dict[tuple[str, str], list[_Seen]] = {}
        for seen in self._seen.values():
            if seen.sent().sent_bytes >= LEAST_BYTES:
                connection = seen.connection
                pairs.setdefault((connection.local, connection.peer), []).append(seen)
        return [
            {"local": local, "peer": peer, **_add_up(seen)}
            for (local, peer), seen in sorted(pairs.items())
        ]


def _add_up(connections: list[_Seen]) -> dict[str, Any]:
    totals = Counters(*map(sum, zip(*(seen.sent() for seen in connections), strict=True)))
    rtts = [seen.connection.rtt_us for seen in connections]
    samples = [rate for seen in connections for rate in seen.delivery]
    return {
        "connections": len(connections),
        **totals._asdict(),
        "rtt_us": min((rtt for rtt in rtts if rtt is not None), default=None),
        "delivery_bytes_s": round(median(samples)) if samples else None,
    }


def connections() -> list[Connection]:
    """This process's established TCP connections; none where the kernel does not count."""
    if sys.platform != "linux":
        return []
    kernel = _Kernel()
    deadline = time.monotonic() + LONGEST_S
    seen = []
    with contextlib.suppress(OSError), os.scandir("/proc/self/fd") as descriptors:
        for entry in islice(descriptors, MOST_DESCRIPTORS):
            connection = kernel.read(int(entry.name))
            if connection is not None:
                seen.append(connection)
            if time.monotonic() > deadline:
                break
    return seen


class _Kernel:
    """The C library's calls. Python's own socket objects would make a descriptor non-blocking for
    all of its users where the script has set a default timeout."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._info = ctypes.create_string_buffer(_INFO_BYTES)
        self._address = ctypes.create_string_buffer(_ADDRESS_BYTES)

    def read(self, descriptor: int) -> Connection | None:
        try:
            about = os.fstat(descriptor)
        except OSError:  # it was closed in the meantime
            return None
        info = self._tcp_info(descriptor) if stat.S_ISSOCK(about.st_mode) else None
        if info is None:
            return None
        local = self._name(self._libc.getsockname, descriptor)
        peer = self._name(self._libc.getpeername, descriptor)
        if local is None or peer is None:
            return None
        rtt = _U32.unpack_from(info, _RTT)[0]
        return Connection(
            inode=about.st_ino,
            local=local,
            peer=peer,
            counters=Counters(
                sent_bytes=_U64.unpack_from(info, _SENT)[0],
                busy_us=_U64.unpack_from(info, _BUSY)[0],
                receiver_limited_us=_U64.unpack_from(info, _RECEIVER_LIMITED)[0],
                retransmitted=_U32.unpack_from(info, _RETRANSMITTED)[0],
            ),
            rtt_us=rtt if rtt != _NO_RTT else None,
            delivery_bytes_s=_U64.unpack_from(info, _DELIVERY)[0],
        )

    def _tcp_info(self, descriptor: int) -> bytes | None:
        length = _LENGTH(_INFO_BYTES)
        option = (socket.IPPROTO_TCP, _TCP_INFO, self._info, ctypes.byref(length))
        if self._libc.getsockopt(descriptor, *option):
            return None
        info = self._info.raw[: length.value]
        if len(info) < _RECEIVER_LIMITED + _U64.size or info[0] != _ESTABLISHED:
            return None
        return info

    def _name(self, ask: Any, descriptor: int) -> str | None:
        length = _LENGTH(_ADDRESS_BYTES)
        if ask(descriptor, self._address, ctypes.byref(length)):
            return None
        return address_text(self._address.raw[: length.value])


def address_text(raw: bytes) -> str | None:
    """The address of a `sockaddr`, without its port."""
    family = int.from_bytes(raw[:2], sys.byteorder)
    if family == socket.AF_INET and len(raw) >= 8:
        return socket.inet_ntop(socket.AF_INET, raw[4:8])
    if family != socket.AF_INET6 or len(raw) < 24:
        return None
    if raw[8:20] == _MAPPED:
        return socket.inet_ntop(socket.AF_INET, raw[20:24])
    return socket.inet_ntop(socket.AF_INET6, raw[8:24])


def device_speeds(addresses: set[str]) -> dict[str, int]:
    """Mbit/s of the network device of each address, where that is a real device that says so."""
    import fcntl  # not on every system

    speeds = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError, ValueError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                address = socket.inet_ntop(socket.AF_INET, answer[20:24])
                device = _DEVICES / name
                if address in addresses and (device / "device").exists():
                    mbit_s = int((device / "speed").read_text())
                    if mbit_s > 0:  # -1: unknown
                        speeds[address] = mbit_s
    return speeds


def _is_outward(address: str) -> bool:
    """Loopback is every host's own."""
    return not address.startswith("127.") and address != "::1"
