"""Which operators of a pass become one loop, and the bytes that the loop moves.

Loops over as many elements fuse if one reads what the other made, or both read the same. What is
computed from sums of a loop belongs to that loop. A library call ends the
loops whose results it needs, for all that depends on the call. Each loop reads once what it did not
make, and writes what others need. Values that only backward needs are not written: the compiler
computes them again from what is there.
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
    sums_bytes: int = 0  # of these: read for sums over all rows
    added: int = 0  # elements that are added to memory one by one
    kernels: int  # sums over all rows need more; none for zeros that others compute


class _Made:
    """A value of the pass; `loop` is None if a library or nobody in the pass made it."""

    __slots__ = ("by_library", "is_result", "is_sum", "key", "loop", "reads", "sources", "written")

    def __init__(
        self,
        key: Value,
        loop: _Loop | None,
        sources: Sequence[_Made] = (),
        *,
        is_sum: bool = False,
        is_result: bool = False,
    ) -> None:
        self.key, self.loop, self.is_sum = key, loop, is_sum
        self.is_result = is_result  # of an operator of forward, which kept it
        self.sources = sources  # what the library call read that made it
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
        self.last_call = -1
        self.outside: dict[int, _Made] = {}  # read, by identity
        self.made: list[_Made] = []
        self.again_bytes = self.sums_bytes = self.added = 0
        self.kernels = 1
        self.is_open = True
        self.is_constant = True

    def absorb(self, other: _Loop) -> None:
        self.calls += other.calls
        self.last_call = max(self.last_call, other.last_call)
        self.outside |= other.outside
        self.made += other.made
        self.again_bytes += other.again_bytes
        self.sums_bytes += other.sums_bytes
        self.added += other.added
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
        only_sums = self._only_sums(backward)
        read = sum(v.size_bytes for key, v in self.outside.items() if key not in inside)
        if only_sums:
            read = 0  # nobody but the sums' own kernels reads it
        written = sum(v.size_bytes for v in self.made if v.written or self._is_result(v, backward))
        return FusedLoop(
            calls=tuple(sorted(self.calls)),
            bytes_moved=read + written + self.again_bytes,
            sums_bytes=self.sums_bytes,
            added=self.added,
            kernels=self.kernels - only_sums,
        )

    def _only_sums(self, backward: bool) -> bool:
        """Whether nothing is left of the loop beside sums over all rows, which compute the rest."""
        left = [v for v in self.made if v.written or self._is_result(v, backward)]
        return self.kernels > 1 and all(value.is_sum for value in left)

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
        self._gradient: _Made | None = None  # that the call before multiplied,
        self._by_library = False  # as a matrix or by elements

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
        chosen = self._find_reads(call, by_library=True)
        for value in chosen:
            self._read(value)
            value.by_library = True
        for key in call.writes:
            self._values[key].append(_Made(key, None, chosen))

    def _read(self, value: _Made) -> None:
        value.reads += 1
        value.written = True
        if value.loop and value.loop.is_open:
            value.loop.close()

    def _loop(self, place: int, call: CallValues) -> None:
        chosen = self._find_reads(call)
        loop = self._join(call.elements, chosen)
        loop.calls.append(place)
        loop.last_call = place
        loop.is_constant &= not (call.reads or call.saved or call.saved_results)
        for value in chosen:
            self._read_in(loop, value, call)
        for key in call.saved:
            self._read_in(loop, self._find_saved(loop, key), call)
        for key in call.saved_results:
            self._read_in(loop, _Made(key, None, is_result=True), call)
        if call.again:
            self._read_again(loop, call, chosen)
        loop.again_bytes += call.added_bytes
        loop.added += call.added
        loop.kernels += call.zeros
        of_sums = any(value.loop is loop and value.is_sum for value in chosen)
        is_sum = call.sums_rows or (of_sums and call.elements < loop.elements)
        if call.in_place and chosen[0] in self._values[chosen[0].key]:
            self._values[chosen[0].key].remove(chosen[0])
        for elements, item in call.writes:
            key = (elements, item or chosen[0].key[1])
            made = _Made(key, loop, is_sum=is_sum)
            loop.made.append(made)
            self._values[made.key].append(made)

    def _find_reads(self, call: CallValues, *, by_library: bool = False) -> list[_Made]:
        """Backward of a product multiplies one gradient twice: by each factor."""
        chosen: list[_Made] = []
        gradient, self._gradient = self._gradient, None
        is_second = call.multiplies and gradient is not None and gradient.key in call.reads
        is_second &= self._by_library == by_library
        for key in call.reads:
            if is_second and gradient and key == gradient.key and gradient not in chosen:
                chosen.append(gradient)
            elif is_second:
                chosen.append(_Made(key, None))  # kept by forward
            else:
                chosen.append(self._find(key, chosen, by_library=by_library))
        if call.multiplies and self._backward and not is_second:
            self._gradient = next((one for one in chosen if one.loop or one.sources), None)
            self._by_library = by_library
        return chosen

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
        for others. Sums over all rows begin as sums of parts, and end in a kernel each."""
        loop.kernels += 1 + call.sums
        sources = sum(value.size_bytes for value in loop.outside.values())
        directly = sum(value.size_bytes for value in chosen)
        again_bytes = sources if call.saved else min(sources, directly)
        loop.again_bytes += again_bytes
        loop.sums_bytes += again_bytes if call.sums else 0

    def _join(self, elements: int, chosen: Sequence[_Made]) -> _Loop:
        """The open loop over as many elements that made or read one of these values, else one that
        a library call has ended for others only."""
        loops: list[_Loop] = []
        for value in chosen:
            makers = [value.loop] if value.loop else self._readers(value)
            loops += [one for one in makers if _fits(one, value, elements)]
        distinct = list(dict.fromkeys(one for one in loops if one.is_open))
        if distinct:
            first, *others = distinct
            for other in others:
                first.absorb(other)
                self._loops.remove(other)
            return first
        recent = [one for one in loops if one in self._loops[-_REMEMBERED:]]
        for one in recent:
            makes = any(value.loop is one and not value.reads for value in chosen)
            if makes and not any(_needs(value, one) for value in chosen):
                return one
        loop = _Loop(elements)
        self._loops.append(loop)
        return loop

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
            if value.written if by_library else not value.by_library and value.loop:
                return value
        for value in values:
            if value.loop and not by_library:
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
            kept = value.loop is None and not value.is_result
            if value.key == key and kept and not self._is_current(value):
                return value
        return _Made(key, None)

    def _is_current(self, value: _Made) -> bool:
        return any(value is one for one in self._values[value.key])

    def _new(self, key: Value) -> _Made:
        value = _Made(key, None)
        self._values[key].append(value)
        return value


def _fits(loop: _Loop, value: _Made, elements: int) -> bool:
    """What a loop sums up, and what is computed from the sums, ends in the loop's own kernels."""
    if loop.elements == elements:
        return True
    return value.loop is loop and value.key[0] == elements


def _needs(value: _Made, loop: _Loop) -> bool:
    """Whether something outside the loop, which waits for the loop, made this value."""
    if value.loop is loop:
        return False
    first = min(loop.calls)  # what ended before cannot wait for it
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if one.loop is loop:
            return True
        if one.loop is None:
            waiting += [source for source in one.sources if id(source) not in seen]
            seen.update(map(id, one.sources))
        elif id(one.loop) not in seen and one.loop.last_call > first:
            seen.add(id(one.loop))
            waiting += one.loop.outside.values()
    return False
