"""The Python stacks of a memory snapshot: each distinct one once, its frames as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.records.encode_json import replace_invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from stepscope.trace.plausible import OddValues

    Frame = tuple[str, int, str]  # file, line, function

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
