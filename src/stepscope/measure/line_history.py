"""Which line of the user's code created which node of the autograd graph, in the memory step."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import torch

from stepscope.measure.line_watch import LineWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stepscope.measure.line_watch import UserLine
    from stepscope.measure.saved_tensors import Saved


class LineHistory:
    """From each sequence number on, the line that creates the nodes; None: no line does."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._lines: list[UserLine | None] = []
        self._open: list[UserLine] = []
        self.watch = LineWatch(self._enter)

    def _enter(self, line: UserLine, running: bool) -> Callable[[], None]:
        del running
        self._open.append(line)
        self._note()
        return self._leave

    def _leave(self) -> None:
        self._open.pop()
        self._note()

    def _note(self) -> None:
        self._starts.append(int(torch.autograd._get_sequence_nr()))
        self._lines.append(self.running)

    @property
    def running(self) -> UserLine | None:
        """The innermost line that runs now."""
        return self._open[-1] if self._open else None

    def line_of(self, number: int) -> UserLine | None:
        place = bisect_right(self._starts, number) - 1
        return self._lines[place] if place >= 0 else None

    def bytes_by_line(self, saved: Iterable[Saved]) -> dict[UserLine, tuple[int, int]]:
        """Bytes and tensors that each line's nodes keep."""
        sums: dict[UserLine, tuple[int, int]] = {}
        for one in saved:
            line = self.line_of(one.number)
            if line is not None:
                size, tensors = sums.get(line, (0, 0))
                sums[line] = (size + one.size_bytes, tensors + one.tensors)
        return sums
