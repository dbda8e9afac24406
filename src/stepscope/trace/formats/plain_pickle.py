"""Read a pickle of plain data without running anything in it; refuse every other one."""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from stepscope.errors import UnreadableInputError

# All opcodes are checked before the first one runs. Only those that make dicts, lists, tuples,
# strings, bytes, numbers, booleans and None are allowed. Opcodes that name, call or build anything
# else are refused, and so are lengths and indices that do not fit the file. The rest is loaded by
# an unpickler that would refuse the same things again. Memory stays within about ten times the
# file's size: a part that is referred to again is not copied, and the number of containers is
# limited by the file's length.

# A gigabyte of empty lists is not a snapshot.
MAX_CONTAINERS = 30_000_000
_FREE_CONTAINERS = 1_000_000  # that a file of any length may hold
_BYTES_PER_CONTAINER = 8  # a snapshot's have about thirty
_LARGEST_TUPLE = 1_000  # all levels counted
_LONGEST_LINE = 4096  # of a number or an index written as text
_LONGEST_REASON = 200
_LONGEST_INT = 9  # bytes: 64 bits and a sign

_PLAIN = b"(.012Nadelstu)}]\x85\x86\x87\x88\x89\x94"  # opcodes without an argument
_ARGUMENT = {  # opcode -> bytes of its argument
    b"K": 1, b"h": 1, b"q": 1, b"\x80": 1,
    b"M": 2,
    b"J": 4, b"j": 4,
    b"G": 8, b"\x95": 8,
}  # fmt: skip
_COUNTED = {  # opcode -> bytes of the length in front of its argument
    b"U": 1, b"C": 1, b"\x8c": 1, b"\x8a": 1,
    b"T": 4, b"B": 4, b"X": 4, b"\x8b": 4,
    b"\x8e": 8, b"\x8d": 8,
}  # fmt: skip
_SHORT_LINES = b"ILFgp"  # numbers and indices as text
_LONG_LINES = b"SV"
_CONTAINERS = b"dlt}]\x85\x86\x87"
_TUPLES = frozenset(b"t\x85\x86\x87")
_PAIR, _FRAME = 0x86, 0x95
_NUMBERS = frozenset(b"NKMJG\x88\x89\x8a")
_DICTS = b"d}"
_STOP, _LONG_BINPUT, _PUT, _LONG4 = ord("."), ord("r"), ord("p"), 0x8B
_SHORT = -1
_PUTS = b"qrp\x94"
_NAMED = b"c\x93ioRb\x81\x92PQ\x82\x83\x84"  # name, call or build something


def _steps() -> list[int]:
    """Opcode -> bytes to the next opcode; _SHORT: the next byte says; 0: must be checked."""
    table = [0] * 256
    for opcode in _PLAIN:
        table[opcode] = 1
    for code, size in _ARGUMENT.items():
        table[code[0]] = 1 + size
    for code, size in _COUNTED.items():
        if size == 1:
            table[code[0]] = _SHORT
    for opcode in (_STOP, _FRAME, *_TUPLES):
        table[opcode] = 0
    return table


_STEP = _steps()
_LENGTH = {code[0]: size for code, size in _COUNTED.items()}


def load_plain(data: bytes, name: str) -> tuple[Any, int]:
    """The pickle's value, and the number of dicts in it. Raises UnreadableInputError."""
    counts, nested = _scan(data, name)
    limit = min(MAX_CONTAINERS, _FREE_CONTAINERS + len(data) // _BYTES_PER_CONTAINER)
    if sum(counts[code] for code in _CONTAINERS) > limit:
        raise UnreadableInputError(
            f"{name} holds more than {limit:,} dicts and lists: record a shorter history "
            "(max_entries)"
        )
    if nested:
        no_limit = [len(data)] * 256  # memo indices were checked before

        def after(at: int) -> int:
            further = _STEP[data[at]]
            if further == _SHORT:
                return at + 2 + data[at + 1]
            if further or data[at] in _TUPLES:
                return at + (further or 1)
            if data[at] == _FRAME:
                return at + 9
            return _next_opcode(data, at, data[at], no_limit, name)

        if largest_tuple(data, after) > _LARGEST_TUPLE:
            raise UnreadableInputError(
                f"{name} is a pickle, but not a memory snapshot: a tuple in it holds more than "
                f"{_LARGEST_TUPLE:,} parts"
            )
    with _no_collector():
        try:
            return _Plain(io.BytesIO(data)).load(), sum(counts[code] for code in _DICTS)
        except MemoryError:
            raise
        except Exception as error:
            why = str(error)[:_LONGEST_REASON]
            raise UnreadableInputError(f"{name} is a damaged pickle: {why}") from None


class _Plain(pickle.Unpickler):
    """Refuses everything that is not plain data; the scan has refused it already."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, _pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it asks for something outside it")


def _scan(data: bytes, name: str) -> tuple[list[int], bool]:
    """Count each opcode, and find out whether all tuples are pairs of numbers, as torch writes
    them. Raises UnreadableInputError for an opcode that is not allowed."""
    counts = [0] * 256
    at, step = 0, _STEP
    last = last_but_one = 0
    nested = False
    try:
        while True:
            opcode = data[at]
            counts[opcode] += 1
            further = step[opcode]
            if further > 0:
                at += further
            elif further == _SHORT:
                at += 2 + data[at + 1]
            elif opcode == _STOP:
                return counts, nested
            elif opcode == _FRAME:  # may stand between a pair and its numbers
                at += 9
                continue
            elif opcode in _TUPLES:
                flat = opcode == _PAIR and last in _NUMBERS and last_but_one in _NUMBERS
                nested |= not flat
                at += 1
            else:
                at = _next_opcode(data, at, opcode, counts, name)
            last_but_one, last = last, opcode
    except IndexError:
        raise UnreadableInputError(
            f"{name} is a pickle that ends early (byte {len(data):,}): was it copied whole?"
        ) from None


def _next_opcode(data: bytes, at: int, opcode: int, counts: list[int], name: str) -> int:
    size = _LENGTH.get(opcode)
    if size is not None:
        length = int.from_bytes(data[at + 1 : at + 1 + size], "little")
        if opcode == _LONG4 and length > _LONGEST_INT:
            raise _refused(name, at, "it holds an integer of more than 64 bits")
        if at + 1 + size + length > len(data):
            raise IndexError
        return at + 1 + size + length
    if opcode == _LONG_BINPUT:
        _check_put(int.from_bytes(data[at + 1 : at + 5], "little"), counts, name, at)
        return at + 5
    if opcode in _SHORT_LINES or opcode in _LONG_LINES:
        end = data.find(b"\n", at)
        if end < 0:
            raise IndexError
        line = data[at + 1 : end]
        if opcode in _SHORT_LINES and len(line) > _LONGEST_LINE:
            raise _refused(name, at, "it holds a number of thousands of digits")
        if opcode == _PUT:
            _check_put(int(line) if line.isdigit() else -1, counts, name, at)
        return end + 1
    raise _refused(name, at, _asks_for(data, at, opcode))


def _check_put(index: int, counts: list[int], name: str, at: int) -> None:
    """The memo grows one by one; an index far beyond it would only fill memory."""
    if not 0 <= index <= sum(counts[code] for code in _PUTS):
        shown = f"{index:,}" if index < 1 << 64 else "of many digits"
        raise _refused(name, at, f"it uses memo index {shown}, which no writer does")


def _asks_for(data: bytes, at: int, opcode: int) -> str:
    if opcode not in _NAMED:
        return f"it holds something that is not plain data (opcode {opcode:#04x})"
    if opcode == ord("c"):
        words = data[at + 1 : at + 200].split(b"\n")[:2]
        return f"it asks for {b'.'.join(words).decode('ascii', 'replace')}"
    import pickletools  # few files need it

    names = {ord(known.code): known.name for known in pickletools.opcodes}
    return f"it asks for code ({names[opcode]})"


def _refused(name: str, at: int, why: str) -> UnreadableInputError:
    return UnreadableInputError(
        f"{name} is a pickle that is not plain data: {why} (byte {at:,}). Nothing of it was run. "
        "Memory snapshots are written by torch.cuda.memory._dump_snapshot"
    )


@contextmanager
def _no_collector() -> Iterator[None]:
    """There are millions of dicts and no cycle: collecting would take most of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# The size of the largest tuple in a pickle, over all levels, found without making one.
#
# A tuple used as a dict key is hashed, and the hash visits every part each time it occurs: a
# hundred thousand levels crash the process, and forty levels that hold the next one twice never
# end. So the pickle's stack is simulated with sizes in place of values: 1 for everything but
# tuples.

_LEAVES = frozenset(b"NILFKMJGUCTBXSV)}]\x88\x89\x8a\x8b\x8c\x8d\x8e")
_TO_MARK = frozenset(b"eudlt1")
_COUNTED_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_POPS = {ord("a"): 1, ord("s"): 2}
_GETS, _PUT_OPCODES = frozenset(b"hjg"), frozenset(b"qrp")
_MARK, _POP, _DUP, _MEMOIZE, _STOP_OPCODE = b"("[0], b"0"[0], b"2"[0], 0x94, b"."[0]
_MOST = 1 << 60  # counted no further
_TUPLE, _MAKES_CONTAINER = b"t"[0], frozenset(b"dlt")


def largest_tuple(data: bytes, after: Callable[[int], int]) -> int:
    """`after` gives the position of the next opcode. Ends early if the stack is inconsistent:
    loading ends there too, and reports it."""
    stack = _SizeStack()
    at = 0
    try:
        while data[at] != _STOP_OPCODE:
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
        elif opcode in _PUT_OPCODES:
            self._memo[_index(opcode, argument)] = stack[-1]
        elif opcode == _MEMOIZE:
            self._memo[len(self._memo)] = stack[-1]
        elif opcode == _DUP:
            stack.append(stack[-1])
        elif opcode == _POP:
            if self._marks and self._marks[-1] == len(self._stack):
                self._marks.pop()
            else:
                self._stack.pop()

    def _close(self, opcode: int) -> None:
        items = self._cut(self._marks.pop())
        if opcode == _TUPLE:
            self._tuple(items)
        elif opcode in _MAKES_CONTAINER:
            self._stack.append(1)

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
