"""Nsight's numbers and texts as names, in the words that Kineto uses for the same events."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stepscope.records.trace import ABSENT, HostKind

if TYPE_CHECKING:
    from stepscope.trace.columns import Collector

UNNAMED = "(unnamed)"
RANGE_TYPES = (59, 60, 70, 71)  # eventType of push/pop and start/end, recorded or imported

# Nsight's own enumerations (ENUM_CUDA_MEMCPY_OPER, ENUM_CUDA_MEM_KIND), which are not CUPTI's.
_COPIES = (
    *("Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),
    *("Unified HtoD", "Unified DtoH", "Unified DtoD"),
)
_MEMORIES = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
_SYNCS = (
    ("WaitEvent", "Stream Wait Event"),
    ("StreamSynchronize", "Stream Sync"),
    ("Event", "Event Sync"),
    ("DeviceSynchronize", "Context Sync"),
    ("CtxSynchronize", "Context Sync"),
)
_API_VERSION = re.compile(r"_v\d{4,}\Z")
_BARE_OPERATOR = re.compile(r"(?:aten|prims|autograd::engine|torch::autograd|_?c10d\w*)::\S")
_BACKWARD = re.compile(r"\w*Backward\d*")


def copy_name(kinds: tuple[int, int, int]) -> str:
    """The name of a copy of this copyKind, srcKind and dstKind."""
    kind, source, target = kinds
    return (
        f"Memcpy {_word(_COPIES, kind)} ({_word(_MEMORIES, source)} -> {_word(_MEMORIES, target)})"
    )


def memset_name(kind: int) -> str:
    return f"Memset ({_word(_MEMORIES, kind)})"


def graph_name(graph: int) -> str:
    return f"CUDA graph {graph}"


def sync_name(call: str) -> str:
    """Named after the call that waits: syncType does not fit its own enumeration (2025.3)."""
    return next((word for part, word in _SYNCS if part in call), "Unknown Sync")


def call_name(name: str) -> str:
    """cudaLaunchKernel_v7000 -> cudaLaunchKernel; cuMemcpyHtoD_v2 stays: the driver says so."""
    return _API_VERSION.sub("", name)


def parse_range(text: str) -> tuple[str, str, str]:
    """Name, sequence number and shapes, as torch.autograd.profiler.emit_nvtx writes them."""
    name, tagged, rest = text.partition(", op_id = ")
    if tagged and rest[:1].isdecimal():
        shapes = rest.partition(", sizes = ")[2].partition(", input_op_ids = ")[0]
    else:
        name, _, shapes = text.partition(", sizes = ")
    name, _, sequence = name.partition(", seq = ")
    if sequence and not (sequence.isdecimal() and len(sequence) < 19):
        return text, "", ""
    return (text, "", "") if shapes and not shapes.startswith("[") else (name, sequence, shapes)


class RangeCodes(dict[tuple[str, bool, str, bool], tuple[int, int, int, int]]):
    """(name, has a sequence number, shapes, has a tail) -> kind, name, shapes and forward thread.

    The texts of operators almost all differ, because of their ids; these keys are few.
    """

    def __init__(self, columns: Collector) -> None:
        super().__init__()
        self._columns = columns

    def parse(self, text: str) -> tuple[int, int, int, int, int]:
        """Kind, name, shapes, forward thread and the sequence number, or -1."""
        name, sequence, shapes = parse_range(text)
        row = self[name, bool(sequence), shapes, len(name) < len(text)]
        return (*row, int(sequence) if sequence else ABSENT)

    def __missing__(self, key: tuple[str, bool, str, bool]) -> tuple[int, int, int, int]:
        name, numbered, shapes, tagged = key
        kind = _kind(name, numbered=numbered, shaped=bool(shapes), tagged=tagged)
        row = self[key] = (
            kind,
            self._columns.names[name],
            self._columns.texts[shapes.encode()] if shapes else ABSENT,
            # The export does not say which thread ran the forward pass.
            1 if numbered and _BACKWARD.fullmatch(name) else ABSENT,
        )
        return row


def _kind(name: str, *, numbered: bool, shaped: bool, tagged: bool) -> HostKind:
    """`record_function` blocks get an id like operators, but no number and no shapes."""
    operator = numbered or shaped or (tagged and "::" in name) or _BARE_OPERATOR.match(name)
    return HostKind.OPERATOR if operator else HostKind.ANNOTATION


def _word(words: tuple[str, ...], key: int) -> str:
    return words[key] if 0 <= key < len(words) else "Unknown"
