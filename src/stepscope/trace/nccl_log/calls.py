"""Every call as a row of numbers, and the algorithm that a later line names for it."""

from __future__ import annotations

import struct
from collections import Counter, deque
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from stepscope.records.job import KINDS
from stepscope.records.nccl import Choice, NcclOps
from stepscope.records.trace import ABSENT
from stepscope.trace.nccl_log.lines import CHOICE, OWN_KERNEL, text_of

if TYPE_CHECKING:
    import re

    from numpy.typing import NDArray

    _Chosen = tuple[str | None, int, str, str, int | None, int | None]  # as in a Choice

_MOST_WAITING = 64  # calls of one kind and size that may wait for the line on their algorithm
_MOST_SIZES = 4096
_MOST_BYTES = 1 << 50  # of one call
_MOST_CODES = 127  # one byte holds no more
_MOST_NAMES = 1 << 15  # of streams; only mixed lines have more
_MOST_CHOICES = 1 << 16
MOST_CALLS = 8_000_000  # half a gigabyte

# NCCL's numbers: ncclDataType_t, and the algorithms and protocols that versions before 2.24 print.
_WIDTHS = dict(enumerate((1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)))
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
_KIND_NAMES = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
    "AlltoAll": "all_to_all", "AllToAll": "all_to_all", "AllToAllPivot": "all_to_all",
    "Broadcast": "broadcast", "Reduce": "reduce", "Send": "send", "Recv": "recv",
    "SendRecv": "send_recv", "Gather": "gather", "Scatter": "scatter",
}  # fmt: skip
_CODE_OF = {name: code for code, name in enumerate(KINDS)}
_TOTAL_KINDS = frozenset(("all_gather", "reduce_scatter", "all_to_all"))  # count is one rank's part
_UNTUNED = frozenset(("send", "recv", "send_recv", "other"))

_ROW = struct.Struct("<bihqqqqiiiq")
_ROW_TYPE = np.dtype(
    [
        ("kind", "<i1"), ("communicator", "<i4"), ("datatype", "<i2"), ("op_count", "<i8"),
        ("count", "<i8"), ("size_bytes", "<i8"), ("reduction", "<i8"), ("root", "<i4"),
        ("ranks", "<i4"), ("stream", "<i4"), ("line", "<i8"),
    ]
)  # fmt: skip
_TUNED = struct.Struct("<qbbhh")
_TUNED_TYPE = np.dtype(
    [
        ("op", "<i8"),
        ("algorithm", "<i1"),
        ("protocol", "<i1"),
        ("first_channel", "<i2"),
        ("last_channel", "<i2"),
    ]
)


class Calls:
    """Every call as a row of numbers, and the algorithm that a later line names for it."""

    def __init__(self) -> None:
        self.unmatched = 0
        self.left_out = 0
        self._count = 0
        self._rows = bytearray()
        self._tuned = bytearray()
        self._algorithms: dict[str, int] = {}
        self._protocols: dict[str, int] = {}
        self._streams: dict[str, int] = {}
        self._waiting: dict[tuple[int, str, int], deque[int]] = {}
        self._chosen: Counter[_Chosen] = Counter()

    def add(
        self, process: int, comm: int, says_algorithm: bool, ranks: int, line: int,
        found: re.Match[bytes],
    ) -> bool:  # fmt: skip
        """False when the line cannot be read, as for `choose`."""
        if self._count == MOST_CALLS:
            self.left_out += 1
            return True
        name, op_count, count, datatype, op, root, _, _, stream = found.groups()
        kind = _KIND_NAMES.get(text_of(name), "other")
        width = _WIDTHS.get(int(datatype))
        part_bytes = int(count) * width if width else ABSENT
        size_bytes = part_bytes * ranks if width and kind in _TOTAL_KINDS else part_bytes
        if size_bytes > _MOST_BYTES or not ranks:
            return False
        place = _code(self._streams, text_of(stream), _MOST_NAMES)
        try:
            self._rows += _ROW.pack(
                _CODE_OF[kind], comm, int(datatype), int(op_count, 16), int(count), size_bytes,
                int(op), int(root), ranks, place, line,
            )  # fmt: skip
        except struct.error:  # numbers that NCCL cannot have meant
            return False
        if says_algorithm and kind not in _UNTUNED:
            for size in {part_bytes, size_bytes}:  # which one is printed depends on the version
                self._wait((process, kind, size))
        self._count += 1
        return True

    def _wait(self, key: tuple[int, str, int]) -> None:
        if key not in self._waiting:
            if len(self._waiting) > _MOST_SIZES:
                self._waiting.clear()
            self._waiting[key] = deque(maxlen=_MOST_WAITING)
        self._waiting[key].append(self._count)

    def choose(self, process: int, text: bytes) -> bool:
        chosen = _chosen(text)
        if chosen is None:
            return False
        kind, size, algorithm, protocol, *ends = chosen
        op = self._latest(process, kind, size)
        codes = (
            _code(self._algorithms, algorithm, _MOST_CODES),
            _code(self._protocols, protocol, _MOST_CODES),
        )
        ends = [ABSENT if end is None else end for end in ends]
        try:
            row = _TUNED.pack(ABSENT if op is None else op, *codes, *ends)
        except struct.error:
            return False
        if chosen in self._chosen or len(self._chosen) < _MOST_CHOICES:
            self._chosen[chosen] += 1
        if op is None:
            self.unmatched += 1
        else:
            self._tuned += row
        return True

    def _latest(self, process: int, kind: str | None, size: int) -> int | None:
        """The latest such call: an earlier one of the same kind and size was answered, or never is.

        Calls of a group are answered together and not in their order, but equal ones equally.
        """
        queues = (self._waiting.get((process, k, size)) for k in ([kind] if kind else KINDS))
        latest = max((queue for queue in queues if queue), key=lambda q: q[-1], default=None)
        return latest.pop() if latest else None

    def choices(self) -> tuple[Choice, ...]:
        return tuple(
            Choice(
                kind=kind,
                size_bytes=size,
                algorithm=algorithm,
                protocol=protocol,
                first_channel=first,
                last_channel=last,
                count=count,
            )
            for (kind, size, algorithm, protocol, first, last), count in self._chosen.items()
        )

    def columns(self, communicators: NDArray[np.int32]) -> NcclOps:
        rows = np.frombuffer(self._rows, dtype=_ROW_TYPE)
        tuned = np.frombuffer(self._tuned, dtype=_TUNED_TYPE)
        columns = {name: np.ascontiguousarray(rows[name]) for name in _ROW_TYPE.names or ()}
        if len(rows):
            columns["communicator"] = communicators[columns["communicator"]]
        for name in ("algorithm", "protocol", "first_channel", "last_channel"):
            columns[name] = np.full(len(rows), ABSENT, dtype=_TUNED_TYPE[name])
            columns[name][tuned["op"]] = tuned[name]
        return NcclOps(
            algorithms=tuple(self._algorithms),
            protocols=tuple(self._protocols),
            streams=tuple(self._streams),
            **columns,
        )


@lru_cache(maxsize=4096)
def _chosen(raw: bytes) -> _Chosen | None:
    text = text_of(raw)
    if found := CHOICE.match(text):
        name, size, algorithm, protocol, first, last = found.groups()
        algorithm, protocol = _named(algorithm, _ALGORITHMS), _named(protocol, _PROTOCOLS)
        ends = (int(first), int(last)) if first else (None, None)
    elif found := OWN_KERNEL.match(text):
        name, algorithm, size, protocol, channels = found.groups()
        algorithm = algorithm.upper()
        ends = (0, int(channels) - 1) if channels else (None, None)
    else:
        return None
    kind = _KIND_NAMES.get(name, "other") if name else None
    return kind, int(size), algorithm, protocol, *ends


def _named(text: str, names: tuple[str, ...]) -> str:
    """Older versions print a number."""
    return dict(zip("0123456789", names, strict=False)).get(text, text.upper())


def _code(table: dict[str, int], name: str, most: int) -> int:
    """ABSENT where there are more names than NCCL can have."""
    if name not in table and len(table) == most:
        return ABSENT
    return table.setdefault(name, len(table))
