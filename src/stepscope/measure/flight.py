"""Turns the entries of torch's flight recorder into lines of comms.jsonl.

torch keeps its last collectives in a ring, to debug jobs that hang: 2.13 keeps 2000 by default, 2.9
keeps as many as TORCH_FR_BUFFER_SIZE says. Reading it changes nothing.
"""

from __future__ import annotations

import bisect
import math
import sys
from typing import TYPE_CHECKING, Any

from stepscope.measure.capture_gate import gate
from stepscope.measure.never_raise import note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
# The first key contained in the recorder's name counts, so longer names come first.
_KINDS = {
    "barrier": "barrier",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    **{kind: kind for kind in ("reduce_scatter", "all_gather", "all_reduce", "all_to_all")},
    **{kind: kind for kind in ("broadcast", "reduce", "gather", "scatter", "send", "recv")},
}
_DTYPES = {
    "Byte": ("uint8", 1),
    "Char": ("int8", 1),
    "Short": ("int16", 2),
    "Int": ("int32", 4),
    "Long": ("int64", 8),
    "UInt16": ("uint16", 2),
    "UInt32": ("uint32", 4),
    "UInt64": ("uint64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "ComplexHalf": ("complex32", 4),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
    "Bool": ("bool", 1),
}


def recorders() -> list[tuple[str, Callable[[], bytes]]]:
    """The recorders this build of torch can dump; none while a CUDA graph is being captured."""
    torch = sys.modules["torch"]
    if torch.cuda.is_available() and not gate.lets_through():
        note("flight recorder", "left alone: a CUDA graph was being captured")
        return []
    c10d = getattr(torch._C, "_distributed_c10d", None)
    return [(name, getattr(c10d, name)) for name in _RECORDERS if hasattr(c10d, name)]


def as_line(entry: dict[str, Any], sizes: dict[str, int], step: int | None) -> dict[str, Any]:
    """One line of comms.jsonl. Values that the recorder did not measure are None, never zero."""
    name = str(entry["profiling_name"])
    kind = _kind(name)
    group, description = entry.get("process_group") or ("", "")
    group_size = sizes.get(group)
    p2p = bool(entry["is_p2p"])
    took_ms = entry.get("duration_ms")
    return {
        "kind": kind,
        "group": group,
        "group_description": description,
        "group_size": group_size,
        "sequence": entry["p2p_seq_id" if p2p else "collective_seq_id"],
        "operation": entry["op_id"],
        "p2p": p2p,
        "size_bytes": _size_bytes(kind, entry, group_size),
        "input_sizes": entry["input_sizes"],
        "output_sizes": entry["output_sizes"],
        "dtype": _dtype(entry),
        "created_ns": entry["time_created_ns"],
        "started_ns": None,
        "ended_ns": None,
        # A watchdog noticed these up to one poll later: bounds, not times.
        "started_by_ns": entry.get("time_discovered_started_ns") or None,
        "ended_by_ns": entry.get("time_discovered_completed_ns") or None,
        "duration_ns": round(took_ms * 1e6) if took_ms is not None else None,
        "step": step,
        "name": name,
        "source": "flight recorder",
    }


def identity(line: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for the same collective in two dumps."""
    return tuple(line[key] for key in ("group", "name", "sequence", "operation", "created_ns"))


def _kind(name: str) -> str:
    plain = name.rpartition(":")[2].lower()
    return next((kind for part, kind in _KINDS.items() if part in plain), plain)


def _dtype(entry: dict[str, Any]) -> str | None:
    names = entry["input_dtypes"] or entry["output_dtypes"]
    return _DTYPES.get(names[0], (names[0].lower(), 0))[0] if names else None


def _size_bytes(kind: str, entry: dict[str, Any], group_size: int | None) -> int | None:
    """The whole message: what comes out of gathers, what goes into the rest."""
    inputs = _bytes(entry["input_sizes"], entry["input_dtypes"])
    outputs = _bytes(entry["output_sizes"], entry["output_dtypes"])
    if kind in ("all_gather", "gather"):
        return outputs or (inputs * group_size if inputs and group_size else None)
    if kind == "scatter":
        return inputs or (outputs * group_size if outputs and group_size else None)
    return inputs or outputs


def _bytes(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int | None:
    total = 0
    for index, shape in enumerate(sizes):
        dtype = dtypes[min(index, len(dtypes) - 1)] if dtypes else ""
        width = 1 if dtype.startswith("Float8") else _DTYPES.get(dtype, ("", 0))[1]
        if not width:
            return None
        total += math.prod(shape) * width
    return total if sizes else None


def step_at(marks: list[tuple[int, int]], created_ns: int) -> int:
    """The step that ran then; marks are (when it began, step)."""
    index = bisect.bisect_right(marks, created_ns, key=lambda mark: mark[0])
    return marks[max(0, index - 1)][1]


def name_buckets(lines: Iterable[dict[str, Any]], replica: dict[str, Any]) -> None:
    """Number the all-reduces of this replica's buckets, by group, size and order."""
    sizes = [bucket["size_bytes"] for bucket in replica["buckets"]]
    following = 0
    for line in lines:
        if not sizes or line["kind"] != "all_reduce" or line["group"] != replica["group"]:
            continue
        if line["size_bytes"] != sizes[following]:
            following = 0
        if line["size_bytes"] == sizes[following]:
            line["ddp"], line["bucket"] = replica["index"], following
            following = (following + 1) % len(sizes)
