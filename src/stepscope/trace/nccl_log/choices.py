"""Which algorithm NCCL chose for calls of one kind and size, and which call lines make sense."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import convert

from stepscope.records.nccl import Choice
from stepscope.trace.nccl_log.lines import CHOICE, OWN_KERNEL, to_text

if TYPE_CHECKING:
    import re

    _Chosen = tuple[str | None, int, str, str, int | None, int | None]  # as in a Choice

_MOST_CHOICES = 1 << 16
_MOST_BYTES = 1 << 50  # of one call
_MOST_CHANNELS = (1 << 15) - 1
_MOST_DATATYPES = (1 << 15) - 1
_MOST_CALLS = (1 << 63) - 1
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
_COUNT_PER_RANK = frozenset(("all_gather", "reduce_scatter", "all_to_all"))


def is_plausible_call(call: re.Match[bytes]) -> bool:
    """False for numbers that no call has: the line is damaged."""
    name, op_count, count, datatype, _, _, _, ranks, _ = call.groups()
    kind = _KIND_NAMES.get(to_text(name), "other")
    width = _WIDTHS.get(int(datatype), 0)
    size_bytes = int(count) * width * (int(ranks) if kind in _COUNT_PER_RANK else 1)
    return (
        int(ranks) > 0
        and size_bytes <= _MOST_BYTES
        and int(datatype) <= _MOST_DATATYPES
        and int(op_count, 16) <= _MOST_CALLS
    )


class ChoiceCounter:
    def __init__(self) -> None:
        self._counts: Counter[_Chosen] = Counter()

    def add(self, text: bytes) -> bool:
        """False when the line cannot be read."""
        chosen = _parse(text)
        if chosen is None or max(chosen[-2] or 0, chosen[-1] or 0) > _MOST_CHANNELS:
            return False
        if chosen in self._counts or len(self._counts) < _MOST_CHOICES:
            self._counts[chosen] += 1
        return True

    def choices(self) -> tuple[Choice, ...]:
        rows = [(*chosen, count) for chosen, count in self._counts.items()]
        columns = Choice.__struct_fields__
        return convert([dict(zip(columns, row, strict=True)) for row in rows], tuple[Choice, ...])


@lru_cache(maxsize=4096)
def _parse(raw: bytes) -> _Chosen | None:
    text = to_text(raw)
    if match := CHOICE.match(text):
        name, size, algorithm, protocol, first, last = match.groups()
        algorithm, protocol = _name(algorithm, _ALGORITHMS), _name(protocol, _PROTOCOLS)
        ends = (int(first), int(last)) if first else (None, None)
    elif match := OWN_KERNEL.match(text):
        name, algorithm, size, protocol, channels = match.groups()
        algorithm = algorithm.upper()
        ends = (0, int(channels) - 1) if channels else (None, None)
    else:
        return None
    kind = _KIND_NAMES.get(name, "other") if name else None
    return kind, int(size), algorithm, protocol, *ends


def _name(text: str, names: tuple[str, ...]) -> str:
    """Older versions print a number."""
    return dict(zip("0123456789", names, strict=False)).get(text, text.upper())
