"""Read torch's flight recorder: entries as lines of comms.jsonl, and the collectives of the
whole run before the recorder overwrites itself.
"""

from __future__ import annotations

import bisect
import gzip
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.measure.cuda_graphs import gate
from stepscope.measure.folder import note_unwritten
from stepscope.measure.never_raise import never_raise, note
from stepscope.measure.writer import started_thread
from stepscope.records.dtypes import BY_SCALAR_TYPE

if TYPE_CHECKING:
    Recorders = Callable[[], list[tuple[str, Callable[[], bytes]]]]

# torch keeps its last collectives in a ring, to debug jobs that hang: 2.13 keeps 2000 by default,
# 2.9 keeps as many as TORCH_FR_BUFFER_SIZE says. Reading it changes nothing.

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
    names = entry["input_dtypes"] or entry["output_dtypes"]
    dtype = BY_SCALAR_TYPE.get(names[0]) if names else None
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
        "dtype": dtype.name if dtype else names[0].lower() if names else None,
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
        if dtype not in BY_SCALAR_TYPE:
            return None
        total += math.prod(shape) * BY_SCALAR_TYPE[dtype].item_bytes
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


# The collectives of the whole run: torch's flight recorder, read before it overwrites itself.
#
# The recorder is a ring of some thousand entries. Reading it holds the interpreter for about 20
# microseconds per entry, so it is read between two steps, at most for `BUDGET` of the run's time.
# Where collectives come faster than that allows, some stretches of steps are seen and others are
# not; in a long run these stretches become rarer. Ranks decide by step and by elapsed time, so that
# they pause together and keep nearly the same stretches. A short thread packs what was read.

NAME = "collectives-{part:05d}.json.gz"
BUDGET = 0.002  # of the run's time
FIRST_STEP = 64
SLOT = 16  # steps: ranks whose clocks disagree a little still choose the same one
_SHORTEST_S, _LONGEST_S = 5.0, 60.0
_CAPACITY = 2000  # of the recorder, until it is known
_FILLED = 0.6  # of the recorder, when it is read again
_PER_ENTRY_S = 25e-6  # until it is known
_READS_PER_STRETCH = 32  # then the pause between two reads doubles
_READS_PER_PART = 256
_FIELDS = {
    "record": rb'"record_id":(\d+)',
    "sequence": rb'"collective_seq_id":(\d+)',
    "created_ns": rb'"time_created_ns":(\d+)',
    "group": rb'"process_group":\["([^"\\]*)"',
    "name": rb'"profiling_name":"([^"\\]*)"',
    "p2p": rb'"is_p2p":(true|false)',
}
_RECORD = b'"record_id":'
_DURATION = re.compile(rb'"duration_ms":([0-9.eE+-]+)')


class CollectiveLog:
    """One rank's log. `due` is the step before which it wants to be called."""

    def __init__(
        self,
        folder: Path,
        *,
        recorders: Recorders = recorders,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._folder = folder
        self._recorders = recorders
        self._now = now
        self._read_s = now()
        self._read_step = 0
        self._last: dict[str, int] = {}  # recorder -> the last entry that was read
        self._reads = 0
        self._ever = 0  # entries that the recorder had counted
        self._packing: threading.Thread | None = None
        self.due = FIRST_STEP

    @never_raise
    def step_begins(self, step: int, *, disturbed: bool = False) -> None:
        """Read the recorder if it is time to; a step that is profiled is left alone."""
        if step < self.due:
            return
        self.due = _next_slot(step + 1)
        if not disturbed:
            self._read(step)

    @never_raise
    def close(self, step: int) -> None:
        """The last steps; the process group may be gone by now, the recorder is not."""
        if self._read_step < step:
            self._read(step, last=True)
        self._join()

    def _read(self, step: int, *, last: bool = False) -> None:
        began = self._now()
        dumps = [(name, dump()) for name, dump in self._recorders()]
        took = self._now() - began
        self._join()
        about = {"steps": [self._read_step, step], "took_ns": round(took * 1e9)}
        if not last:  # a process that ends may start no thread
            pack = partial(self._pack, dumps, about)
            self._packing = started_thread(pack, "stepscope-collectives")
        if self._packing is None:
            self._pack(dumps, about)
        self._plan(step, [dump for _, dump in dumps], took)

    def _plan(self, step: int, dumps: list[bytes], took: float) -> None:
        """Read again when the recorder is well filled, as far as the budget allows."""
        now, ever = self._now(), sum(map(_count_ever, dumps))
        steps, elapsed = max(1, step - self._read_step), max(1e-6, now - self._read_s)
        entries = sum(dump.count(_RECORD) for dump in dumps)
        capacity = entries if entries < ever else max(entries, _CAPACITY)
        per_s = max(ever - self._ever, 1) / elapsed
        wanted_s = min(_FILLED * capacity / per_s, _LONGEST_S)
        next_entries = min(capacity, entries + per_s * wanted_s)
        affordable_s = (took / entries if entries else _PER_ENTRY_S) * next_entries / BUDGET
        self._reads += 1
        longer = 2.0 ** (self._reads // _READS_PER_STRETCH)
        pause_s = longer * max(_SHORTEST_S, wanted_s, affordable_s)
        self._read_step, self._read_s, self._ever = step, now, ever
        self.due = _next_slot(step + max(1, round(pause_s * steps / elapsed)))

    def _join(self) -> None:
        if self._packing is not None:
            self._packing.join(timeout=5)
            self._packing = None

    # In a thread of its own.

    @never_raise
    def _pack(self, dumps: list[tuple[str, bytes]], about: dict[str, Any]) -> None:
        lines = []
        for recorder, dump in dumps:
            columns = read_columns(dump, after=self._last.get(recorder, -1))
            if columns["record"]:
                self._last[recorder] = columns["record"][-1]
                lines.append(json.dumps(_line(recorder, columns, about)))
        if lines:
            path = self._folder / NAME.format(part=1 + self._reads // _READS_PER_PART)
            # A whole gzip member or none.
            packed = gzip.compress("".join(f"{line}\n" for line in lines).encode(), 6)
            try:
                with path.open("ab", buffering=0) as file:
                    before = file.seek(0, os.SEEK_END)
                    if file.write(packed) != len(packed):
                        file.truncate(before)
            except OSError as error:
                note_unwritten(path.name, error)


def read_columns(dump: bytes, *, after: int = -1) -> dict[str, list[Any]]:
    """The recorder's collectives after this record, by field; without sends and receives.

    Patterns take a tenth of the time that parsing takes, for which all threads would wait.
    """
    columns: dict[str, list[Any]] = {
        name: re.findall(pattern, dump) for name, pattern in _FIELDS.items()
    }
    entries = dump.count(_RECORD)
    if any(len(column) != entries for column in columns.values()):
        columns = _parse(dump)
    durations = _DURATION.findall(dump)
    if len(durations) == entries:
        columns["duration_ns"] = [round(float(text) * 1e6) for text in durations]
    for name in ("record", "sequence", "created_ns"):
        columns[name] = list(map(int, columns[name]))
    p2p = columns.pop("p2p")
    kept = [
        place
        for place, record in enumerate(columns["record"])
        if record > after and p2p[place] in (b"false", False)
    ]
    return {name: [_text(column[place]) for place in kept] for name, column in columns.items()}


def _parse(dump: bytes) -> dict[str, list[Any]]:
    """Names that need escapes, or a recorder that writes in another way."""
    entries = json.loads(dump).get("entries") or []
    return {
        "record": [entry["record_id"] for entry in entries],
        "sequence": [entry["collective_seq_id"] for entry in entries],
        "created_ns": [entry["time_created_ns"] for entry in entries],
        "group": [(entry.get("process_group") or [""])[0] for entry in entries],
        "name": [entry["profiling_name"] for entry in entries],
        "p2p": [bool(entry["is_p2p"]) for entry in entries],
    }


def _line(recorder: str, columns: dict[str, list[Any]], about: dict[str, Any]) -> dict[str, Any]:
    """Numbers that grow are written as differences, names as places in a list: both pack well."""
    line = {
        "schema": 1,
        "recorder": recorder,
        **about,
        "first_record": columns["record"][0],
        "created_ns": _differences(columns["created_ns"]),
        "sequence": _differences(columns["sequence"]),
    }
    for plural, name in (("groups", "group"), ("names", "name")):
        known = list(dict.fromkeys(columns[name]))
        places = {text: place for place, text in enumerate(known)}
        line[plural], line[name] = known, [places[text] for text in columns[name]]
    if "duration_ns" in columns:
        line["duration_ns"] = columns["duration_ns"]
    return line


def _differences(values: list[int]) -> list[int]:
    """The first value, then what each adds to the one before it."""
    return [here - before for before, here in zip([0, *values[:-1]], values, strict=True)]


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _count_ever(dump: bytes) -> int:
    """Entries since the process began: the recorder numbers them."""
    digits = re.match(rb"\d+", dump[dump.rfind(_RECORD) + len(_RECORD) :][:24])
    return int(digits[0]) + 1 if _RECORD in dump and digits else 0


def _next_slot(step: int) -> int:
    return -(-step // SLOT) * SLOT
