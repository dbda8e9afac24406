"""What Linux knows about processes that may hang: states, calls, children and connections.

Files under /proc only: nothing is stopped, signalled or traced. What cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_MOST_TASKS, _MOST_CHILDREN, _DEEPEST = 400, 256, 3
_MOST_DESCRIPTORS = 4096
_MOST_CONNECTIONS = 64
_LONGEST_COMMAND = 200
# System calls in which a thread waits; the first argument of some is a file.
_CALLS = {
    "x86_64": (
        "0 read 1 write 7 poll 17 pread64 23 select 35 nanosleep 45 recvfrom 47 recvmsg 61 wait4 "
        "72 fcntl 73 flock 202 futex 230 clock_nanosleep 232 epoll_wait 247 waitid 270 pselect6 "
        "271 ppoll 281 epoll_pwait"
    ),
    "aarch64": (
        "22 epoll_pwait 25 fcntl 32 flock 63 read 64 write 67 pread64 72 pselect6 73 ppoll "
        "95 waitid 98 futex 101 nanosleep 115 clock_nanosleep 207 recvfrom 212 recvmsg 260 wait4"
    ),
}
_ON_FILES = frozenset(("read", "write", "pread64", "recvfrom", "recvmsg", "fcntl", "flock"))


def read_text(path: Path | str, most: int = 1 << 20) -> str:
    """Empty if it cannot be read."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, most).decode(errors="replace")
        finally:
            os.close(descriptor)
    return ""


def killed_for_memory() -> int:
    """Count processes that this machine has killed for lack of memory since it started."""
    words = read_text("/proc/vmstat").split()
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


class Stat:
    """The fields of a stat file that tell whether something runs."""

    __slots__ = ("cpu_ticks", "major_faults", "name", "parent", "started_ticks", "state", "status")

    def __init__(self, text: str) -> None:
        head, _, rest = text.rpartition(")")  # a name may hold brackets
        fields = rest.split()
        self.name = head.partition("(")[2]
        self.state = fields[0]
        self.parent = int(fields[1])
        self.major_faults = int(fields[9])
        self.cpu_ticks = int(fields[11]) + int(fields[12])
        self.started_ticks = int(fields[19])
        self.status = int(fields[49])  # as wait() gives it, of a process that has ended

    @classmethod
    def read(cls, path: Path | str) -> Stat | None:
        try:
            return cls(read_text(path, 4096))
        except (ValueError, IndexError):
            return None


def task_facts(pid: int) -> dict[int, dict[str, Any]]:
    """Each thread of a process: its state and, where Linux says so, in which call it waits."""
    facts = {}
    for task in _numbered(_PROC / str(pid) / "task")[:_MOST_TASKS]:
        stat = Stat.read(task / "stat")
        if stat is not None:
            facts[int(task.name)] = {
                "state": stat.state,
                "cpu_ticks": stat.cpu_ticks,
                "waits_in": _plain(read_text(task / "wchan", 128)),
                **_call(pid, read_text(task / "syscall", 256)),
            }
    return facts


def _plain(name: str) -> str | None:
    name = name.strip()
    return None if name in ("", "0") else name


def _call(pid: int, text: str) -> dict[str, Any]:
    words = text.split()
    known = _CALLS.get(os.uname().machine, "").split()
    if not words or not words[0].isdigit():
        return {}
    name = dict(zip(known[::2], known[1::2], strict=True)).get(words[0], f"call {words[0]}")
    facts: dict[str, Any] = {"call": name}
    if name in _ON_FILES and len(words) > 1:
        with contextlib.suppress(OSError, ValueError):
            facts["file"] = os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")  # noqa: PTH115
    return facts


# A call that reads much counts when it ends, its blocks when the disk is asked for them.
_COUNTERS = (("input_bytes", "rchar"), ("output_bytes", "wchar"), ("disk_bytes", "read_bytes"))


def process_facts(pid: int) -> dict[str, Any] | None:
    """One process: what it is, its state and what it has used. None if it is gone."""
    stat = Stat.read(f"/proc/{pid}/stat")
    if stat is None:
        return None
    io = dict(
        line.split(": ", 1) for line in read_text(f"/proc/{pid}/io").splitlines() if ": " in line
    )
    command = read_text(f"/proc/{pid}/cmdline", 4096).replace("\0", " ").strip()
    facts: dict[str, Any] = {
        "at_s": time.monotonic(),
        "pid": pid,
        "name": stat.name,
        "command": command[:_LONGEST_COMMAND],
        "state": stat.state,
        "started_ticks": stat.started_ticks,
        "cpu_ticks": stat.cpu_ticks,
        "major_faults": stat.major_faults,
        "rss_bytes": _resident(pid),
    }
    for name, field in _COUNTERS:
        if io.get(field, "").isdigit():
            facts[name] = int(io[field])
    main = task_facts(pid).get(pid, {}) if stat.state != "Z" else {}
    facts |= {name: main[name] for name in ("waits_in", "call", "file") if main.get(name)}
    return facts


def _resident(pid: int) -> int | None:
    words = read_text(f"/proc/{pid}/statm", 256).split()
    if len(words) < 2 or not words[1].isdigit():
        return None
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE")


def children_of(pid: int) -> list[int]:
    """Processes that it started, and what those started."""
    found: list[int] = []
    waiting = [(pid, 0)]
    while waiting and len(found) < _MOST_CHILDREN:
        parent, depth = waiting.pop(0)
        for task in _numbered(_PROC / str(parent) / "task")[:_MOST_TASKS]:
            ids = [int(word) for word in read_text(task / "children").split() if word.isdigit()]
            found += ids
            if depth + 1 < _DEEPEST:
                waiting += [(child, depth + 1) for child in ids]
    return found[:_MOST_CHILDREN]


_MOVES = ("cpu_ticks", "major_faults", *(name for name, _ in _COUNTERS))


def look_twice(pids: list[int], apart_s: float) -> dict[int, dict[str, Any]]:
    """Facts of these processes, and in `moved` what they used between two looks."""
    before = {pid: process_facts(pid) for pid in pids}
    time.sleep(apart_s)
    looks = {}
    for pid in pids:
        then, now = before[pid], process_facts(pid)
        if now is None:
            continue
        looks[pid] = {**now, "moved": moved(then or {}, now)}
        del looks[pid]["cpu_ticks"]
    return looks


def moved(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What a process has used between two looks."""
    if then.get("started_ticks") != now["started_ticks"]:
        return {}
    used = {name: now[name] - then[name] for name in _MOVES if name in then and name in now}
    used["seconds"] = round(now["at_s"] - then["at_s"], 3)
    if "cpu_ticks" in used:
        used["cpu_s"] = used.pop("cpu_ticks") / os.sysconf("SC_CLK_TCK")
    return used


# TCP connections of this process. One that sends a segment again and again gets no answer.


def connections() -> list[dict[str, Any]]:
    """Established connections with their unanswered retries, the most troubled first."""
    if sys.platform != "linux":
        return []
    inodes = _own_sockets()
    rows = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in read_text(f"/proc/self/net/{name}", 4 << 20).splitlines()[1:]:
            row = _connection(line.split(), family, inodes)
            if row is not None:
                rows.append(row)
    rows.sort(key=lambda row: (-row["retries"], -row["unsent_bytes"]))
    return rows[:_MOST_CONNECTIONS]


def _own_sockets() -> set[str]:
    inodes = set()
    with contextlib.suppress(OSError), os.scandir("/proc/self/fd") as entries:
        for number, entry in enumerate(entries):
            if number >= _MOST_DESCRIPTORS:
                break
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)  # noqa: PTH115
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    return inodes


_OPEN = ("01", "02")  # established; or a connection that is being asked for


def _connection(
    words: list[str], family: socket.AddressFamily, inodes: set[str]
) -> dict[str, Any] | None:
    try:
        if words[9] not in inodes or words[3] not in _OPEN:
            return None
        local, peer = (_address(word, family) for word in words[1:3])
        unsent = int(words[4].partition(":")[0], 16)
        retries = int(words[6], 16)
    except (IndexError, ValueError, OSError, struct.error):
        return None
    return {
        "local": local,
        "peer": peer,
        "unsent_bytes": unsent,
        "retries": retries if unsent or words[3] != "01" else 0,
    }


def _address(word: str, family: socket.AddressFamily) -> str:
    """As the kernel prints it: words of the machine's byte order in hexadecimal."""
    text, _, port = word.partition(":")
    raw = b"".join(
        struct.pack("=I", int(text[place : place + 8], 16)) for place in range(0, len(text), 8)
    )
    if family == socket.AF_INET6 and raw.startswith(b"\0" * 10 + b"\xff\xff"):
        raw, family = raw[12:], socket.AF_INET
    return f"{socket.inet_ntop(family, raw)}:{int(port, 16)}"


def _numbered(folder: Path) -> list[Path]:
    try:
        return sorted(
            (path for path in folder.iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
        )
    except OSError:
        return []
