"""The size of the largest tuple in a pickle, over all levels, found without making one.

A tuple used as a dict key is hashed, and the hash visits every part each time it occurs: a hundred
thousand levels crash the process, and forty levels that hold the next one twice never end. So the
pickle's stack is simulated with sizes in place of values: 1 for everything but tuples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LEAVES = frozenset(b"NILFKMJGUCTBXSV)}]\x88\x89\x8a\x8b\x8c\x8d\x8e")
_TO_MARK = frozenset(b"eudlt1")
_COUNTED_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_POPS = {ord("a"): 1, ord("s"): 2}
_GETS, _PUTS = frozenset(b"hjg"), frozenset(b"qrp")
_MARK, _POP, _DUP, _MEMOIZE, _STOP = b"("[0], b"0"[0], b"2"[0], 0x94, b"."[0]
_MOST = 1 << 60  # counted no further
_TUPLE, _MAKES_CONTAINER = b"t"[0], frozenset(b"dlt")


def largest_tuple(data: bytes, after: Callable[[int], int]) -> int:
    """`after` gives the position of the next opcode. Ends early if the stack is inconsistent:
    loading ends there too, and reports it."""
    stack = _SizeStack()
    at = 0
    try:
        while data[at] != _STOP:
            following = after(at)
            stack.run(data[at], data[at + 1 : following])
            at = following
    except (IndexError, KeyError, ValueError):
        pass
    return stack.largest


class _SizeStack:
    """The pickle's stack, marks and memo, holding sizes only."""

    def __init__(self) -> None:
        self.largest = 0
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: dict[int, int] = {}

    def run(self, opcode: int, argument: bytes) -> None:
        stack = self._stack
        if opcode in _LEAVES:
            stack.append(1)
        elif opcode == _MARK:
            self._marks.append(len(stack))
        elif opcode in _TO_MARK:
            self._close(opcode)
        elif opcode in _COUNTED_TUPLES:
            self._tuple(self._cut(len(stack) - _COUNTED_TUPLES[opcode]))
        elif opcode in _POPS:
            self._cut(len(stack) - _POPS[opcode])
        elif opcode in _GETS:
            stack.append(self._memo[_index(opcode, argument)])
        elif opcode in _PUTS:
            self._memo[_index(opcode, argument)] = stack[-1]
        elif opcode == _MEMOIZE:
            self._memo[len(self._memo)] = stack[-1]
        elif opcode == _DUP:
            stack.append(stack[-1])
        elif opcode == _POP:
            self._pop()

    def _close(self, opcode: int) -> None:
        items = self._cut(self._marks.pop())
        if opcode == _TUPLE:
            self._tuple(items)
        elif opcode in _MAKES_CONTAINER:
            self._stack.append(1)

    def _pop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _cut(self, start: int) -> list[int]:
        if start < 0:
            raise IndexError
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _tuple(self, items: list[int]) -> None:
        size = 1 + sum(items)
        self.largest = max(self.largest, size)
        self._stack.append(min(size, _MOST))


def _index(opcode: int, argument: bytes) -> int:
    return int(argument) if opcode in b"gp" else int.from_bytes(argument, "little")
