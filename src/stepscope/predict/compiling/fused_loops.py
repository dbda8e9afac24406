"""Which operators of a pass become one loop, and the bytes that the loop moves.

Loops over as many elements fuse if one reads what the other made, or both read the same. A library
call ends the loops whose results it needs. Each loop reads once what it did not make, and writes
what others need. Values that only backward needs are not written: the compiler computes them again
from what is there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

import msgspec

from stepscope.predict.compiling.operator_values import Way

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.predict.compiling.operator_values import CallValues, Value

_REMEMBERED = 8  # values of a size
_MASK_BYTES = 1
_ITEMS = (4, 2, 8, 1)  # bytes


class FusedLoop(msgspec.Struct, frozen=True, kw_only=True):
    """One loop of the compiled pass."""

    calls: tuple[int, ...]  # places in the pass
    bytes_moved: int
    kernels: int  # statistics over all rows need one more; none for zeros that others compute


class _Made:
    """A value of the pass; `loop` is None if a library or nobody in the pass made it."""

    __slots__ = ("by_library", "key", "loop", "reads", "written")

    def __init__(self, key: Value, loop: _Loop | None) -> None:
        self.key, self.loop = key, loop
        self.reads = 0
        self.by_library = False  # read by a library
        self.written = loop is None

    @property
    def size_bytes(self) -> int:
        return self.key[0] * self.key[1]


class _Loop:
    """A loop while the pass is walked."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.calls: list[int] = []
        self.outside: dict[int, _Made] = {}  # read, by identity
        self.made: list[_Made] = []
        self.again_bytes = 0
        self.kernels = 1
        self.is_open = True
        self.is_constant = True

    def absorb(self, other: _Loop) -> None:
        self.calls += other.calls
        self.outside |= other.outside
        self.made += other.made
        self.again_bytes += other.again_bytes
        self.kernels += other.kernels - 1
        self.is_constant &= other.is_constant
        for value in other.made:
            value.loop = self
        other.is_open = False

    def close(self) -> None:
        """With the loops that it needs: none of them may wait for what comes after."""
        self.is_open = False
        for value in self.outside.values():
            if value.loop and value.loop.is_open:
                value.loop.close()

    def finish(self, *, backward: bool) -> FusedLoop:
        if self.is_constant and not any(value.written for value in self.made):
            return FusedLoop(calls=tuple(sorted(self.calls)), bytes_moved=0, kernels=0)
        inside = {id(value) for value in self.made}
        read = sum(v.size_bytes for key, v in self.outside.items() if key not in inside)
        written = sum(v.size_bytes for v in self.made if v.written or self._is_result(v, backward))
        return FusedLoop(
            calls=tuple(sorted(self.calls)),
            bytes_moved=read + written + self.again_bytes,
            kernels=self.kernels,
        )

    def _is_result(self, value: _Made, backward: bool) -> bool:
        """Never read: a gradient, or a mask that backward needs."""
        return not value.reads and (backward or value.key[1] == _MASK_BYTES)


def fuse_loops(calls: Sequence[CallValues], *, backward: bool) -> list[FusedLoop]:
    """The loops of one pass, in the order of their first call."""
    return _PassWalk(backward).walk(calls)


class _PassWalk:
    def __init__(self, backward: bool) -> None:
        self._backward = backward
        self._values: defaultdict[Value, deque[_Made]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED)
        )
        self._loops: list[_Loop] = []

    def walk(self, calls: Sequence[CallValues]) -> list[FusedLoop]:
        for place, call in enumerate(calls):
            if call.way == Way.LOOP:
                self._loop(place, call)
                continue
            if call.way == Way.ALONE:
                self._keep_zeros()
            self._library(call)
        finished = [loop.finish(backward=self._backward) for loop in self._loops]
        return sorted(finished, key=lambda loop: loop.calls)

    def _keep_zeros(self) -> None:
        """What scatters adds to the zeros before it."""
        if self._loops and self._loops[-1].is_constant:
            for value in self._loops[-1].made:
                value.written = True

    def _library(self, call: CallValues) -> None:
        """All it reads is written, and the loops that made it are complete."""
        chosen: list[_Made] = []
        for key in call.reads:
            value = self._find(key, chosen, by_library=True)
            chosen.append(value)
            self._read(value)
            value.by_library = True
        for key in call.writes:
            self._values[key].append(_Made(key, None))

    def _read(self, value: _Made) -> None:
        value.reads += 1
        value.written = True
        if value.loop and value.loop.is_open:
            value.loop.close()

    def _loop(self, place: int, call: CallValues) -> None:
        chosen: list[_Made] = []
        for key in call.reads:
            chosen.append(self._find(key, chosen))
        loop = self._join(call.elements, chosen)
        loop.calls.append(place)
        loop.is_constant &= not (call.reads or call.saved)
        for value in chosen:
            self._read_in(loop, value, call)
        for key in call.saved:
            self._read_in(loop, self._find_saved(loop, key), call)
        if call.again:
            self._read_again(loop, call, chosen)
        for elements, item in call.writes:
            made = _Made((elements, item or chosen[0].key[1]), loop)
            loop.made.append(made)
            self._values[made.key].append(made)

    def _read_in(self, loop: _Loop, value: _Made, call: CallValues) -> None:
        value.reads += 1
        if value.loop is loop:
            return
        if call.looks_up:
            return
        loop.outside[id(value)] = value
        if value.loop:
            value.written = True
            if value.loop.is_open and value.loop.elements != loop.elements:
                value.loop.close()

    def _read_again(self, loop: _Loop, call: CallValues, chosen: Iterable[_Made]) -> None:
        """A second kernel reads all that the first one read; a sum may also read what is written
        for others."""
        loop.kernels += 1
        sources = sum(value.size_bytes for value in loop.outside.values())
        directly = sum(value.size_bytes for value in chosen)
        loop.again_bytes += sources if call.saved else min(sources, directly)

    def _join(self, elements: int, chosen: Sequence[_Made]) -> _Loop:
        """The open loop over as many elements that made or read one of these values."""
        loops: list[_Loop] = []
        for value in chosen:
            makers = [value.loop] if value.loop else self._readers(value)
            loops += [one for one in makers if one.is_open and one.elements == elements]
        distinct = list(dict.fromkeys(loops))
        if not distinct:
            loop = _Loop(elements)
            self._loops.append(loop)
            return loop
        first, *others = distinct
        for other in others:
            first.absorb(other)
            self._loops.remove(other)
        return first

    def _readers(self, value: _Made) -> list[_Loop]:
        return [loop for loop in self._loops[-_REMEMBERED:] if id(value) in loop.outside]

    def _find(self, key: Value, chosen: Sequence[_Made], *, by_library: bool = False) -> _Made:
        """Without tensors: the newest value of this size that nobody read, else a residual.

        A loop's input that only loops read is more likely to be read again than a library's.
        """
        if not key[1]:
            key = self._with_item(key[0])
        values = [value for value in reversed(self._values[key]) if value not in chosen]
        for value in values:
            if not value.reads:
                return value
        if self._backward and chosen:
            return _Made(key, None)  # kept by forward
        for value in values:
            if value.written if by_library else not value.by_library:
                return value
        return values[0] if values else self._new(key)

    def _with_item(self, elements: int) -> Value:
        """A list's dtype is not recorded: that of the newest unread value of this size."""
        for item in _ITEMS:
            if any(not value.reads for value in self._values[elements, item]):
                return elements, item
        return elements, _ITEMS[0]

    def _find_saved(self, loop: _Loop, key: Value) -> _Made:
        """What forward kept; a loop reads one of a size once."""
        for value in loop.outside.values():
            if value.key == key and value.loop is None and not self._is_current(value):
                return value
        return _Made(key, None)

    def _is_current(self, value: _Made) -> bool:
        return any(value is one for one in self._values[value.key])

    def _new(self, key: Value) -> _Made:
        value = _Made(key, None)
        self._values[key].append(value)
        return value
