"""A CUDA memory snapshot (`torch.cuda.memory._dump_snapshot`) -> columns; no code in it is run.

    {"segments": [{"address", "total_size", "device", "blocks": [{"size", "state", "frames"}]}],
     "device_traces": [[{"action", "addr", "size", "time_us", "frames"}]]}

A bare list of segments, as `torch.cuda.memory_snapshot()` gives it, will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.errors import UnreadableInputError
from stepscope.records.memory import ACTIONS, BLOCK_STATES, Blocks, History, Segments, Snapshot
from stepscope.trace.regular_files import head_of, open_file, unreadable
from stepscope.trace.snapshot_pickle import is_pickle, load_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Dicts = list[dict[str, Any]]

_ACTION = {name: code for code, name in enumerate(ACTIONS)}
_STATE = {name: code for code, name in enumerate(BLOCK_STATES)}
_STATE["active_awaiting_free"] = _STATE["active_pending_free"]
_UNKNOWN_ACTION, _UNKNOWN_STATE = _ACTION["unknown"], _STATE["unknown"]
Frames = tuple[tuple[str, int, str], ...]


def is_snapshot(path: Path) -> bool:
    """By content: whether the file is a pickle."""
    return is_pickle(head_of(path))


def snapshots_in(folder: Path) -> list[Path]:
    """Pickles in a folder, by the names that people give them and by their content."""
    named = (file for file in sorted(folder.iterdir()) if file.suffix in (".pickle", ".pkl"))
    return [file for file in named if file.is_file() and is_snapshot(file)]


def read_snapshot(path: Path) -> Snapshot:
    """Raises UnreadableInputError for anything but plain data in the shape of a snapshot."""
    with open_file(path) as file:
        try:
            data = file.read()
        except OSError as error:
            raise unreadable(path, error) from None
    root, dicts = load_plain(data, str(path))
    del data
    return _Reader(str(path), dicts).read(root)


class _Reader:
    """Checks every shape on the way; a part that is referred to again and again counts each time,
    so that a small file cannot ask for endless work."""

    def __init__(self, name: str, dicts: int) -> None:
        self._name = name
        self._left = dicts
        self._stacks: dict[Frames, int] = {}
        self._stack_of: dict[int, int] = {}  # by identity of a list of frames
        self._frame_of: dict[int, tuple[str, int, str]] = {}
        self._unknown: set[str] = set()

    def read(self, root: Any) -> Snapshot:
        if isinstance(root, list):
            root = {"segments": root}
        if not isinstance(root, dict) or "segments" not in root:
            raise UnreadableInputError(
                f"{self._name} is a pickle, but no memory snapshot: there is no 'segments' in it"
            )
        listed = self._dicts(root["segments"], "segments")
        segments = Segments(
            device=self._column(listed, "device", np.int32, 0),
            address=self._column(listed, "address", np.int64),
            total_bytes=self._column(listed, "total_size", np.int64),
        )
        blocks = self._blocks(listed, segments)
        histories = tuple(self._histories(root.get("device_traces") or []))
        settings = root.get("allocator_settings")
        return Snapshot(
            path=self._name,
            segments=segments,
            blocks=blocks,
            histories=histories,
            stacks=tuple(self._stacks),
            settings=settings if isinstance(settings, dict) else {},
            unknown_actions=tuple(sorted(self._unknown)),
        )

    def _dicts(self, value: Any, what: str) -> Dicts:
        if not isinstance(value, list) or any(type(each) is not dict for each in value):
            raise self._misshapen(f"{what} is not a list of dicts")
        self._left -= len(value)
        if self._left < 0:
            raise self._misshapen("it refers to the same parts again and again")
        return value

    def _misshapen(self, why: str) -> UnreadableInputError:
        return UnreadableInputError(f"{self._name} is a pickle, but no memory snapshot: {why}")

    def _column(
        self, rows: Dicts, key: str, kind: type[Any], default: int | None = None
    ) -> NDArray[Any]:
        values = [row.get(key, default) for row in rows]
        return self._whole(values, key, kind)

    def _words(self, rows: Dicts, key: str) -> list[str]:
        values: list[Any] = [row.get(key) for row in rows]
        if not set(map(type, values)) <= {str}:
            raise self._misshapen(f"a {key} is missing or is not a word")
        return values

    def _whole(self, values: Sequence[Any], key: str, kind: type[Any]) -> NDArray[Any]:
        if not set(map(type, values)) <= {int, bool}:
            raise self._misshapen(f"a {key} is missing or is not a whole number")
        try:
            return np.array(values, dtype=kind)
        except OverflowError:
            raise self._misshapen(f"a {key} is too large") from None

    def _blocks(self, listed: Dicts, segments: Segments) -> Blocks:
        inner = [self._dicts(each.get("blocks", []), "blocks") for each in listed]
        many = [len(each) for each in inner]
        flat = [block for each in inner for block in each]
        size = self._column(flat, "size", np.int64)
        segment = np.repeat(np.arange(len(listed), dtype=np.int32), many)
        return Blocks(
            segment=segment,
            address=self._addresses(flat, size, segment, segments),
            size_bytes=size,
            requested_bytes=self._requested(flat, size),
            state=np.array(
                [_STATE.get(state, _UNKNOWN_STATE) for state in self._words(flat, "state")],
                np.int8,
            ),
            stack=self._stack_codes([_frames_of_block(block) for block in flat]),
        )

    def _addresses(
        self, flat: Dicts, size: NDArray[Any], segment: NDArray[Any], segments: Segments
    ) -> NDArray[Any]:
        """Blocks lie behind each other in their segment; older writers leave it at that."""
        if all("address" in block for block in flat):
            return self._column(flat, "address", np.int64)
        before = np.cumsum(size) - size
        first = np.searchsorted(segment, np.arange(len(segments)))
        starts = np.append(before, 0)[np.minimum(first, len(before))]
        out: NDArray[Any] = segments.address[segment] + before - starts[segment]
        return out

    def _requested(self, flat: Dicts, size: NDArray[Any]) -> NDArray[Any]:
        if all("requested_size" in block for block in flat):
            return self._column(flat, "requested_size", np.int64)
        return size

    def _histories(self, traces: Any) -> Iterable[History]:
        if not isinstance(traces, list):
            raise self._misshapen("device_traces is not a list")
        for device, events in enumerate(traces):
            rows = self._dicts(events, "a device's trace")
            actions = self._words(rows, "action")
            self._unknown |= {each[:40] for each in set(actions) - set(_ACTION)}
            yield History(
                device=device,
                action=np.array([_ACTION.get(a, _UNKNOWN_ACTION) for a in actions], np.int8),
                address=self._whole(
                    [row.get("addr", row.get("device_free", 0)) for row in rows], "addr", np.int64
                ),
                size_bytes=self._column(rows, "size", np.int64, 0),
                time_us=self._column(rows, "time_us", np.int64, -1),
                stack=self._stack_codes([row.get("frames") for row in rows]),
            )

    def _stack_codes(self, stacks: Iterable[Any]) -> NDArray[np.int32]:
        known = self._stack_of.get
        new = self._new_stack
        # A stack that is known is not false; the first one is 0, and is looked at twice.
        return np.array([known(id(each)) or new(each) for each in stacks], np.int32)

    def _new_stack(self, frames: Any) -> int:
        if not isinstance(frames, list) or not frames:
            return -1
        known = self._stack_of.get(id(frames))
        if known is not None:
            return known
        stack = tuple(self._frame(frame) for frame in frames)
        code = self._stacks.setdefault(stack, len(self._stacks))
        self._stack_of[id(frames)] = code
        return code

    def _frame(self, frame: Any) -> tuple[str, int, str]:
        known = self._frame_of.get(id(frame))
        if known is not None:
            return known
        if not isinstance(frame, dict):
            raise self._misshapen("a frame is not a dict")
        file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
        told = (
            file if isinstance(file, str) else "",
            line if isinstance(line, int) else 0,
            name if isinstance(name, str) else "",
        )
        self._frame_of[id(frame)] = told
        return told


def _frames_of_block(block: dict[str, Any]) -> Any:
    """Older writers keep a history with each block, the latest first."""
    if "frames" in block:
        return block["frames"]
    history = block.get("history")
    latest = history[0] if isinstance(history, list) and history else None
    return latest.get("frames") if isinstance(latest, dict) else None
