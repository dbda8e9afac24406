"""Whether the training thread is still inside the loop that ends steps, or has left it.

After the last step a script may write, plot or count for as long as it likes: that is no hang.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

from stepscope.measure.hang import system
from stepscope.measure.processes import is_library

_MOST_LOOKS = 2000
_MOST_DEPTH = 400
_MOST_SOURCE = 4 << 20

Chain = list[tuple[CodeType, int]]  # outermost first


def own_chain(frame: FrameType | None) -> Chain:
    """Lines of the user's own files, from the script's outermost one inwards."""
    chain: Chain = []
    for _ in range(_MOST_DEPTH):
        if frame is None:
            break
        if not is_library(frame.f_code.co_filename):
            chain.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return chain[::-1]


class TrainingLoop:
    """Learns from looks at the training thread while steps end."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[CodeType, set[int]]] = {}
        self._looks = 0
        self._last: Chain = []

    def saw(self, frame: FrameType | None) -> None:
        """A step has ended since the last look, so that look was inside the loop; this runs now."""
        if self._looks < _MOST_LOOKS:
            self._looks += 1
            for code, line in self._last:
                self._lines.setdefault(id(code), (code, set()))[1].add(line)
            self._last = own_chain(frame)

    def has_left(self, frame: FrameType | None) -> bool:
        """False where it cannot be said."""
        for code, line in own_chain(frame):
            seen = self._lines.get(id(code))
            if seen is None:
                return False  # called from a line of the loop
            loops = _loops(code.co_filename)
            if any(first <= line <= last and _meets(seen[1], first, last) for first, last in loops):
                return False
            if line not in seen[1]:
                return True
        return False


def _meets(lines: set[int], first: int, last: int) -> bool:
    return any(first <= line <= last for line in lines)


def _loops(file: str) -> list[tuple[int, int]]:
    """The first and last line of each loop; none where the source is not at hand."""
    syntax: Any = sys.modules.get("ast")  # torch has loaded it
    if syntax is None or not hasattr(syntax, "walk"):
        return []
    try:
        tree = syntax.parse(system.read_text(file, _MOST_SOURCE))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    kinds = (syntax.For, syntax.While, syntax.AsyncFor)
    return [(node.lineno, node.end_lineno) for node in syntax.walk(tree) if isinstance(node, kinds)]
