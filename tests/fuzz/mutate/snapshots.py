"""Memory snapshots: values no allocator means, histories that contradict, pickles made by hand."""

from __future__ import annotations

import copy
import pickle
import struct
from typing import TYPE_CHECKING, Any

from fuzz.drive import drive as drive_input
from fuzz.odd_json import HUGE_NUMBERS, NUMBERS, damage, odd_value
from snapshots import IN_C, LOADING, MODEL, Device, frame, training

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

Content = dict[str, Any]

_FRAMES = [MODEL, LOADING, IN_C, [], [frame("", 0, "")], [frame("é\ud800.py", 3, "\x1b[31m")]]
_ACTIONS = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map"),
    *("segment_unmap", "oom", "snapshot", "defragment", ""),
)
_STATES = ("active_allocated", "active_pending_free", "active_awaiting_free", "inactive", "x", "")
_OPCODES = bytes(range(256))


def mutate(rng: Random, folder: Path) -> Path:
    path = folder / "snapshot.pickle"
    if rng.random() < 0.25:
        path.write_bytes(_by_hand(rng))
        return path
    content = rng.choice(_SOURCES)(rng)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 5))):
        rng.choice(_WAYS)(rng, content)
    if rng.random() < 0.15:
        rng.choice((_cycle, _shared))(rng, content)
    root: Any = content.get("segments") if rng.random() < 0.05 else content
    data = pickle.dumps(root, rng.choice((0, 1, 2, 3, 4, 4, 4, 5)))
    path.write_bytes(_bytes(rng, data) if rng.random() < 0.2 else data)
    return path


def drive(path: Path, work: Path) -> str:
    """Sites of an answer add up to its peak, and nothing allocated exceeds what is reserved."""
    from stepscope import StepscopeError
    from stepscope.explain.rank_without_steps import memory_of_snapshot
    from stepscope.trace.formats.snapshot import is_snapshot, read_snapshot

    outcome = drive_input(path, work)
    try:
        snapshot = read_snapshot(path) if is_snapshot(path) else None
    except StepscopeError:
        snapshot = None
    if snapshot is not None:
        memory, _ = memory_of_snapshot(snapshot)
        assert sum(site.size_bytes for site in memory.by_site) == memory.peak_bytes
        assert memory.peak_bytes >= 0
        assert memory.reserved_bytes is None or memory.reserved_bytes >= memory.peak_bytes
    return outcome


# Where it starts from


def _random_history(rng: Random) -> Content:
    device, alive = Device(), []
    for _ in range(rng.randrange(1, 80)):
        if alive and rng.random() < 0.45:
            device.free(alive.pop(rng.randrange(len(alive))))
        else:
            size = rng.choice((1, 511, 512, 700, 5_000_000, rng.randrange(1, 1 << 26)))
            alive.append(device.alloc(size, rng.choice(_FRAMES)))
        if rng.random() < 0.03:
            device.fail(rng.randrange(1 << 33), rng.randrange(1 << 30), rng.choice(_FRAMES))
    device.forget(rng.choice((0, 0, rng.randrange(len(device.events)))))
    return device.snapshot()


def _training(rng: Random) -> Content:
    device = training()
    if rng.random() < 0.5:
        device.fail(8_000_000, 1_000_000, MODEL)
    return copy.deepcopy(device.snapshot())


def _old(rng: Random) -> Content:
    """As writers before 2.1: no address, the latest stack in a history."""
    content = _random_history(rng)
    for segment in content["segments"]:
        for block in segment["blocks"]:
            block["history"] = [{"addr": 0, "frames": block.pop("frames", [])}]
            block.pop("address", None)
            block.pop("requested_size", None)
    return content


_SOURCES = [_random_history, _random_history, _training, _old]


# What is done to it


def _events(content: Content) -> list[Any]:
    traces = content.get("device_traces")
    rows = traces[0] if isinstance(traces, list) and traces else []
    return rows if isinstance(rows, list) else []


def _rows(rng: Random, content: Content) -> list[dict[str, Any]]:
    """Segments, blocks, events or frames: one, some or all of them."""
    held = content.get("segments")
    segments = [each for each in held if isinstance(each, dict)] if isinstance(held, list) else []
    blocks = [
        block
        for each in segments
        if isinstance(each.get("blocks"), list)
        for block in each["blocks"]
        if isinstance(block, dict)
    ]
    events = [each for each in _events(content) if isinstance(each, dict)]
    rows = rng.choice((segments, blocks, blocks, events, events))
    if not rows or rng.random() < 0.2:
        return rows
    return rng.sample(rows, rng.randrange(1, min(len(rows), 8) + 1))


def _fields(rng: Random, content: Content) -> None:
    rows = _rows(rng, content)
    if not rows:
        return
    key = rng.choice(list(rows[0]) or ["size"])
    value = odd_value(rng)
    for row in rows:
        row[key] = value if rng.random() < 0.8 else odd_value(rng)


def _sizes(rng: Random, content: Content) -> None:
    huge = (*HUGE_NUMBERS, 1 << 45, (1 << 45) + 1, 1 << 44, 2**2000, 10**3000, *NUMBERS)
    key = rng.choice(("size", "total_size", "requested_size", "address", "addr", "time_us"))
    for row in _rows(rng, content):
        row[key] = rng.choice(huge)


def _words(rng: Random, content: Content) -> None:
    for row in _rows(rng, content):
        if "action" in row:
            row["action"] = rng.choice(_ACTIONS)
        if "state" in row:
            row["state"] = rng.choice(_STATES)


def _order(rng: Random, content: Content) -> None:
    events = _events(content)
    pick = rng.randrange(5)
    if pick == 0:
        rng.shuffle(events)
    elif pick == 1:
        events.reverse()
    elif pick == 2:
        events += copy.deepcopy(events)
    elif pick == 3 and events:
        del events[:: rng.randrange(1, 4)]
    elif isinstance(content.get("segments"), list) and content["segments"]:
        content["segments"] += copy.deepcopy(content["segments"][: rng.randrange(1, 3)])


def _devices(rng: Random, content: Content) -> None:
    traces = content.get("device_traces")
    if isinstance(traces, list) and rng.random() < 0.5:
        content["device_traces"] = [[] for _ in range(rng.choice((1, 8, 5000)))] + traces
    for row in _rows(rng, content):
        row["device"] = rng.choice((0, 1, 7, 1023, 1024, 10**9, -1, 2**31, 2**70))


def _frames(rng: Random, content: Content) -> None:
    odd = [
        *_FRAMES,
        None,
        7,
        "frames",
        [3],
        [[]],
        [{}],
        [frame("x.py", 2**40, "f")],
        [frame("x.py", -1, "f")],
        [frame("x" * 100_000, 1, "y" * 100_000)],
        [frame("a.py", 1, "f")] * 3000,
        [{"filename": b"x", "line": "3", "name": None}],
    ]
    for row in _rows(rng, content):
        row["frames"] = rng.choice(odd)


def _structure(rng: Random, content: Content) -> None:
    damaged = damage(rng, content, rng.randrange(1, 6))
    content.clear()
    content.update(damaged)


def _cycle(rng: Random, content: Content) -> None:
    """A part that holds itself, or what it lies in."""
    rows = _rows(rng, content)
    if rows:
        row = rng.choice(rows)
        row[rng.choice((*row, "blocks", "frames"))] = rng.choice((content, [content], row, [row]))


def _shared(rng: Random, content: Content) -> None:
    """One part referred to from everywhere."""
    rows = _rows(rng, content)
    if rows and isinstance(content.get("segments"), list):
        content["segments"] = [rows[0]] * rng.choice((2, 100, 3000))
        rows[0]["blocks"] = [rows[0]] * rng.choice((1, 100))


_WAYS: list[Callable[[Random, Content], None]] = [
    _fields, _fields, _fields, _sizes, _sizes, _words, _order, _order, _devices, _frames,
    _structure, _structure,
]  # fmt: skip


# Bytes


def _bytes(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) or 1)
        pick = rng.randrange(5)
        if pick == 0:
            del changed[at:]
        elif pick == 1 and changed:
            changed[at] = rng.randrange(256)
        elif pick == 2:
            changed[at:at] = bytes(rng.choices(_OPCODES, k=rng.randrange(1, 9)))
        elif pick == 3:
            del changed[at : at + rng.randrange(1, 30)]
        else:
            changed[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 2**31, 2**32 - 1)))
    return bytes(changed) or b"\x80"


def _by_hand(rng: Random) -> bytes:
    """Opcodes in an order that no writer has: bombs, deep nesting, lengths that are not there."""
    many = rng.choice((10, 1000, 50_000))
    bombs = (
        b"2\x86" * rng.randrange(1, 70),
        b"\x85" * many,
        b"]2a" * many,
        b"(" * many + b"t" * rng.randrange(many),
        b"]" * many + b"a" * (many - 1),
        b"}" * many + b"K\x00s" * rng.randrange(many),
        b"\x8e" + struct.pack("<Q", rng.choice((5, 2**40, 2**63))) + b"abc",
        b"\x95" + struct.pack("<Q", rng.choice((0, 5, 2**40, 2**63 - 1, 2**64 - 1))),
        b"X" + struct.pack("<I", rng.choice((3, 2**31, 2**32 - 1))) + b"abc",
        b"\x8b" + struct.pack("<i", rng.choice((3, 300, -1))) + b"\x7f" * 300,
        b"r" + struct.pack("<I", rng.choice((0, 1, 2**31, 2**32 - 1))),
        b"L" + b"9" * rng.choice((10, 4000, 5000)) + b"L\n",
        b"I" + rng.choice((b"01", b"12x", b"9" * 4000, b"\xd9\xa3")) + b"\n",
        b"p" + rng.choice((b"0", b"-1", b"9" * 4000)) + b"\n",
        b"V\\ud800\\udfff\n",
        b"U\x03\xff\xfe\xfd",
        rng.choice((b"cos\nsystem\n", b"\x93", b"R", b"b", b"\x81", b"\x82\x01", b"Pid\n", b"Q")),
        bytes(rng.choices(_OPCODES, k=rng.randrange(40))),
    )
    data = b"\x80" + bytes([rng.choice((2, 3, 4, 5))])
    data += rng.choice((b"}", b"]", b"}X\x08\x00\x00\x00segments", b"}]"))
    data += b"".join(rng.choice(bombs) for _ in range(rng.randrange(1, 4)))
    return data + rng.choice((b".", b"Ns.", b"s.", b"a.", b"u.", b""))
