"""Read a CUDA memory snapshot (`torch.cuda.memory._dump_snapshot`) into columns, without
running code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from stepscope.errors import UnreadableInputError
from stepscope.records.memory import ACTIONS, BLOCK_STATES, Blocks, History, Segments, Snapshot
from stepscope.records.quality import MAX_EVENT_BYTES, replace_invalid
from stepscope.records.trace import ABSENT, Flags, Int8, Int64
from stepscope.text import figures
from stepscope.trace.files import is_pickle, read_head, reading
from stepscope.trace.formats.plain_pickle import load_plain
from stepscope.trace.formats.plausible_values import OddValues

Dicts = list[dict[str, Any]]
Place = Callable[[int], str]
Frame = tuple[str, int, str]

#     {"segments": [{"address", "total_size", "device", "blocks": [{"size", "state", "frames"}]}],
#      "device_traces": [[{"action", "addr", "size", "time_us", "frames"}]]}
#
# A bare list of segments, as `torch.cuda.memory_snapshot()` returns it, is also accepted.
# Impossible values are left out and counted under `quality`, so that the columns can be trusted:
# sizes and addresses are in range, segments do not overlap, and no segment holds more than its
# size.

_Table = TypeVar("_Table", Segments, Blocks)
MAX_FILE_BYTES = 2 << 30
MAX_DEVICES = 1024
_MAX_ADDRESS = (1 << 63) - 1
_LATEST_US = 9 * 10**15  # the year 2255, in nanoseconds still a 64-bit number
_LARGEST_SUM = float(1 << 60)

_ACTION = {name: code for code, name in enumerate(ACTIONS)}
_STATE = {name: code for code, name in enumerate(BLOCK_STATES)}
_STATE["active_awaiting_free"] = _STATE["active_pending_free"]
_UNKNOWN_ACTION, _UNKNOWN_STATE = _ACTION["unknown"], _STATE["unknown"]


def is_snapshot(path: Path) -> bool:
    """Whether the file is a pickle, by its content."""
    return is_pickle(read_head(path))


def find_snapshots(folder: Path) -> list[Path]:
    """The pickles in a folder, by suffix and content."""
    named = (file for file in sorted(folder.iterdir()) if file.suffix in (".pickle", ".pkl"))
    return [file for file in named if file.is_file() and is_snapshot(file)]


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot. Raises UnreadableInputError for anything but its plain data."""
    with reading(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
            raise UnreadableInputError(
                f"{path} is larger than {figures.size(MAX_FILE_BYTES)}: record a shorter history "
                "(max_entries)"
            )
        data = file.read(MAX_FILE_BYTES)
    root, dicts = load_plain(data, str(path))
    del data
    return _SnapshotReader(str(path), dicts).read(root)


class _SnapshotReader:
    """Checks all values. A part counts each time it is referred to, so that a small file cannot
    ask for endless work."""

    def __init__(self, name: str, dicts: int) -> None:
        self._name = name
        self._dicts_left = dicts
        self._odd = OddValues()
        self._stacks = SnapshotStacks(self._odd)
        self._unknown: set[str] = set()

    def read(self, root: Any) -> Snapshot:
        if isinstance(root, list):
            root = {"segments": root}
        if not isinstance(root, dict) or not isinstance(root.get("segments"), list):
            raise self._misshapen("there are no 'segments' in it")
        segments, blocks = self._segments(self._dicts(root["segments"], "segments"))
        histories = tuple(self._histories(root.get("device_traces") or []))
        known = any((history.action != _UNKNOWN_ACTION).any() for history in histories)
        notes = self._odd.notes()
        if notes and not known and not len(segments):
            raise self._misshapen(f"nothing in it can be used ({notes[0].detail})")
        return Snapshot(
            path=self._name,
            segments=segments,
            blocks=blocks,
            histories=histories,
            stacks=self._stacks.all(),
            unknown_actions=tuple(sorted(self._unknown)),
            quality=self._odd.notes(),
        )

    def _misshapen(self, why: str) -> UnreadableInputError:
        return UnreadableInputError(f"{self._name} is a pickle, but not a memory snapshot: {why}")

    # Rows and their columns

    def _dicts(self, value: Any, what: str) -> Dicts:
        """The dicts of a list; anything else is left out."""
        if not isinstance(value, list):
            self._odd.add(f"{what.split('[')[0]} (not a list)", 1, value, what)
            return []
        self._dicts_left -= len(value)
        if self._dicts_left < 0:
            raise self._misshapen("it refers to the same parts again and again")
        if set(map(type, value)) <= {dict}:
            return value
        first = next(place for place, item in enumerate(value) if type(item) is not dict)
        rows = [item for item in value if type(item) is dict]
        kind = f"{what.split('[')[0]} (not a dict)"
        self._odd.add(kind, len(value) - len(rows), value[first], f"{what}[{first}]")
        return rows

    def _whole(
        self, values: Sequence[Any], key: str, place: Place, *, highest: int, lowest: int = 0
    ) -> Int64:
        """Integers from `lowest` to `highest`; any other value is counted and ABSENT."""
        try:
            exact = set(map(type, values)) <= {int}
            column = np.array(values if exact else [_integer(v) for v in values], np.int64)
        except OverflowError:
            column = np.array([_integer(value) for value in values], np.int64)
        odd = (column < lowest) | (column > highest)
        if odd.any():
            first = int(odd.argmax())
            self._odd.add(key, int(odd.sum()), values[first], place(first))
            column[odd] = ABSENT
        return column

    def _column(self, rows: Dicts, key: str, place: Place, *, highest: int) -> Int64:
        return self._whole([row.get(key) for row in rows], key, place, highest=highest)

    def _sizes(self, rows: Dicts, key: str, place: Place, default: int | None = None) -> Int64:
        values = [row.get(key, default) for row in rows]
        column = self._whole(values, key, place, highest=MAX_EVENT_BYTES)
        if float(column.sum(dtype=np.float64)) > _LARGEST_SUM:
            raise self._misshapen(f"{key} adds up to more bytes than any machine has")
        return column

    def _codes(
        self, rows: Dicts, key: str, known: dict[str, int], place: Place
    ) -> tuple[Int8, list[Any]]:
        """Words as codes, and the words; anything else gets the code of "unknown"."""
        words: list[Any] = [row.get(key) for row in rows]
        if not set(map(type, words)) <= {str}:
            odd = [at for at, word in enumerate(words) if type(word) is not str]
            self._odd.add(key, len(odd), words[odd[0]], place(odd[0]))
            for at in odd:
                words[at] = "unknown"
        unknown = known["unknown"]
        return np.array([known.get(word, unknown) for word in words], np.int8), words

    # Segments and blocks

    def _segments(self, listed: Dicts) -> tuple[Segments, Blocks]:
        """The plausible segments, with their blocks."""
        place: Place = "segments[{}]".format
        device = self._whole(
            [row.get("device", 0) for row in listed], "device", place, highest=MAX_DEVICES - 1
        )
        segments = Segments(
            device=device.astype(np.int32),
            address=self._column(listed, "address", place, highest=_MAX_ADDRESS - MAX_EVENT_BYTES),
            total_bytes=self._sizes(listed, "total_size", place),
            private=np.array([_is_private(row) for row in listed], np.int8),
        )
        blocks = self._blocks(listed, segments)
        usable = (device >= 0) & (segments.address >= 0) & (segments.total_bytes >= 0)
        filled = np.zeros(len(segments), np.int64)
        np.add.at(filled, blocks.segment, blocks.size_bytes)
        overfull = usable & (filled > segments.total_bytes)
        self._count_segments("blocks larger than their segment", filled, overfull)
        usable &= ~overfull
        usable &= ~self._overlapping(segments, usable)
        if usable.all():
            return segments, blocks
        new_row = (np.cumsum(usable) - 1).astype(np.int32)
        left = _select(blocks, usable[blocks.segment])
        return _select(segments, usable), replace(left, segment=new_row[left.segment])

    def _overlapping(self, segments: Segments, usable: NDArray[Any]) -> NDArray[Any]:
        """Segments that begin inside another of the same device."""
        overlapping = np.zeros(len(segments), np.bool_)
        for device in np.unique(segments.device[usable]).tolist():
            rows = np.flatnonzero(usable & (segments.device == device))
            rows = rows[np.argsort(segments.address[rows], kind="stable")]
            starts = segments.address[rows]
            reach = np.maximum.accumulate(starts + segments.total_bytes[rows])
            overlapping[rows[1:]] = starts[1:] < reach[:-1]
        self._count_segments("segments that overlap", segments.address, overlapping)
        return overlapping

    def _count_segments(self, what: str, values: Int64, odd: NDArray[Any]) -> None:
        if odd.any():
            first = int(odd.argmax())
            self._odd.add(what, int(odd.sum()), int(values[first]), f"segments[{first}]")

    def _blocks(self, listed: Dicts, segments: Segments) -> Blocks:
        """All blocks that have a size."""
        lists = [
            self._dicts(row.get("blocks", []), f"segments[{number}].blocks")
            for number, row in enumerate(listed)
        ]
        segment = np.repeat(np.arange(len(listed), dtype=np.int32), [len(rows) for rows in lists])
        flat = [block for rows in lists for block in rows]

        def place(row: int) -> str:
            number = int(segment[row])
            return f"segments[{number}].blocks[{row - int(np.searchsorted(segment, number))}]"

        size = self._sizes(flat, "size", place)
        state, words = self._codes(flat, "state", _STATE, place)
        unknown = np.flatnonzero(state == _UNKNOWN_STATE).tolist()
        new = [row for row in unknown if words[row] != "unknown"]
        if new:
            self._odd.add("state", len(new), words[new[0]], place(new[0]))
        has_size = size >= 0
        size = np.maximum(size, 0)
        blocks = Blocks(
            segment=segment,
            address=self._addresses(flat, size, segment, segments, place),
            size_bytes=size,
            requested_bytes=self._requested(flat, size, place),
            state=state,
            stack=self._stacks.codes([_frames_of_block(block) for block in flat], place),
        )
        return blocks if has_size.all() else _select(blocks, has_size)

    def _addresses(
        self, flat: Dicts, size: Int64, segment: NDArray[Any], segments: Segments, place: Place
    ) -> Int64:
        """Blocks follow each other in their segment; older writers give no addresses."""
        before = np.cumsum(size) - size
        first = np.searchsorted(segment, np.arange(len(segments)))
        starts = np.append(before, 0)[np.minimum(first, len(before))]
        derived: Int64 = segments.address[segment] + before - starts[segment]
        if not any("address" in block for block in flat):
            return derived
        written = self._column(flat, "address", place, highest=_MAX_ADDRESS)
        return np.where(written >= 0, written, derived)

    def _requested(self, flat: Dicts, size: Int64, place: Place) -> Int64:
        if not any("requested_size" in block for block in flat):
            return size
        requested = self._column(flat, "requested_size", place, highest=MAX_EVENT_BYTES)
        return np.where(requested >= 0, requested, size)

    # Histories

    def _histories(self, traces: Any) -> Iterable[History]:
        if not isinstance(traces, list):
            self._odd.add("device_traces (not a list)", 1, traces)
            return
        if len(traces) > MAX_DEVICES:
            left_out = len(traces) - MAX_DEVICES
            self._odd.add("device_traces", left_out, f"{len(traces):,} devices")
        for device, events in enumerate(traces[:MAX_DEVICES]):
            what = f"device_traces[{device}]"
            yield self._history(device, self._dicts(events, what), f"{what}[{{}}]".format)

    def _history(self, device: int, rows: Dicts, place: Place) -> History:
        """An event with an impossible address or size gets the action "unknown"."""
        action, words = self._codes(rows, "action", _ACTION, place)
        self._unknown |= {word[:40] for word in set(words) - set(_ACTION)}
        addresses = [row.get("addr", row.get("device_free", 0)) for row in rows]
        address = self._whole(addresses, "addr", place, highest=_MAX_ADDRESS)
        size = self._sizes(rows, "size", place, default=0)
        stamps = [row.get("time_us", ABSENT) for row in rows]
        odd = (address < 0) | (size < 0)
        action[odd] = _UNKNOWN_ACTION
        return History(
            device=device,
            action=action,
            address=np.where(odd, 0, address),
            size_bytes=np.where(odd, 0, size),
            time_us=self._whole(stamps, "time_us", place, highest=_LATEST_US, lowest=ABSENT),
            stack=self._stacks.codes([row.get("frames") for row in rows], place),
        )


def _integer(value: Any) -> int:
    fits = type(value) is int and -_MAX_ADDRESS <= value <= _MAX_ADDRESS
    return value if fits else -_MAX_ADDRESS


def _is_private(segment: dict[str, Any]) -> bool:
    """Whether the segment names a pool other than the shared one, which is (0, 0)."""
    pool = segment.get("segment_pool_id")
    return isinstance(pool, (tuple, list)) and any(number != 0 for number in pool)


def _select(table: _Table, rows: Flags) -> _Table:
    return replace(table, **{name: getattr(table, name)[rows] for name in table.__struct_fields__})


def _frames_of_block(block: dict[str, Any]) -> Any:
    """Older writers keep a history with each block, latest first."""
    if "frames" in block:
        return block["frames"]
    history = block.get("history")
    latest = history[0] if isinstance(history, list) and history else None
    return latest.get("frames") if isinstance(latest, dict) else None


# The Python stacks of a memory snapshot: each distinct one once, its frames as plain text.

LONGEST_NAME = 4096
_LAST_LINE = 1 << 31


class SnapshotStacks:
    """Recognises lists of frames by identity, so that a shared one is read only once."""

    def __init__(self, odd: OddValues) -> None:
        self._odd = odd
        self._code: dict[tuple[Frame, ...], int] = {}
        self._code_of_list: dict[int, int] = {}
        self._frames: dict[int, Frame | None] = {}

    def all(self) -> tuple[tuple[Frame, ...], ...]:
        return tuple(self._code)

    def codes(self, stacks: Iterable[Any], place: Callable[[int], str]) -> NDArray[np.int32]:
        """The code of each stack, -1 if none was recorded."""
        known = self._code_of_list.get
        # `or` is fast; it only looks up the first stack, whose code is 0, twice.
        return np.array(
            [known(id(stack)) or self._add(stack, place, row) for row, stack in enumerate(stacks)],
            np.int32,
        )

    def _add(self, frames: Any, place: Callable[[int], str], row: int) -> int:
        if frames is None:
            return -1
        if not isinstance(frames, list):
            self._odd.add("frames (not a list)", 1, frames, place(row))
            return -1
        known = self._code_of_list.get(id(frames))
        if known is not None:
            return known
        readable = (self._frame(frame, place, row) for frame in frames)
        stack = tuple(frame for frame in readable if frame is not None)
        code = self._code.setdefault(stack, len(self._code)) if stack else -1
        self._code_of_list[id(frames)] = code
        return code

    def _frame(self, frame: Any, place: Callable[[int], str], row: int) -> Frame | None:
        if id(frame) in self._frames:
            return self._frames[id(frame)]
        read = None
        if isinstance(frame, dict):
            where = f"{place(row)}.frames"
            read = (
                self._text(frame.get("filename"), "filename", where),
                self._line(frame.get("line"), where),
                self._text(frame.get("name"), "name", where),
            )
        else:
            self._odd.add("frames (not a dict)", 1, frame, place(row))
        self._frames[id(frame)] = read
        return read

    def _line(self, line: Any, where: str) -> int:
        if type(line) is int and 0 <= line < _LAST_LINE:
            return line
        self._odd.add("line", 1, line, where)
        return 0

    def _text(self, text: Any, key: str, where: str) -> str:
        """Cut if too long; without half characters, which no output can hold."""
        if not isinstance(text, str):
            self._odd.add(key, 1, text, where)
            return ""
        if len(text) <= LONGEST_NAME and text.isascii():
            return text
        whole = replace_invalid(text[:LONGEST_NAME])
        if whole != text:
            self._odd.add(f"{key} (cut or repaired)", 1, text, where)
        return whole
