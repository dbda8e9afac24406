"""Waits until gloo has finished its collectives, so that the profiler can stop safely.

torch's profiler frees its events when it stops. A gloo collective ends in a thread of gloo's, which
then writes its end into the event. If that event is already freed, the heap is damaged and the
process dies there or later (torch 2.13 and before; torch's own profiler alone causes it too). DDP
continues as soon as the sums are there, a moment before that end is written; a rank whose gloo
thread waits for a core is still in that moment when its step is over. No recorder keeps gloo's
sends and receives: one that the script waits for only after the window is not known here.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from stepscope.measure import flight, parallel
from stepscope.measure.never_raise import note

PATIENCE_S = 1.0
AT_EXIT_S = 0.25  # a rank whose peer died waits for nothing
_POLL_S = (0.0002, 0.02)  # from, to
_SETTLE_S = 0.1  # when the recorder does not know
_RECORDER = "_dump_fr_trace_json"  # gloo's; NCCL's collectives end where they are launched


def collectives_ended(patience_s: float = PATIENCE_S, *, until_ns: int | None = None) -> bool:
    """Wait until gloo has finished everything created until `until_ns` (by the wall clock).

    False if it has not within `patience_s`.
    """
    try:
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available():
            return True
        groups = parallel.groups() or []
        gloo = any("gloo" in group["backend"] for group in groups)
        # A destroyed group may still have work under way that only the recorder knows of.
        settle_s = _SETTLE_S if gloo else 0.0
        return (bool(groups) and not gloo) or _wait(patience_s, settle_s, until_ns)
    except Exception as error:
        note("waiting for collectives", error)
        return True


def _wait(patience_s: float, settle_s: float, until_ns: int | None) -> bool:
    began = time.monotonic()
    pause_s, longest_s = _POLL_S
    while (ended := _ended(until_ns)) is not True:
        waited_s = time.monotonic() - began
        if ended is None and (waited_s >= min(patience_s, settle_s) or _at_rest()):
            return True
        if waited_s >= patience_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return True


def _ended(until_ns: int | None) -> bool | None:
    """By torch's flight recorder, in which gloo retires a work after it last touched the profiler.

    None when it holds nothing of gloo's: it is off, or this torch does not record gloo.
    """
    dump = dict(flight.recorders()).get(_RECORDER)
    entries = (json.loads(dump()).get("entries") or []) if dump is not None else []
    works = [
        entry
        for entry in entries
        if str(entry.get("profiling_name")).startswith("gloo:") and "retired" in entry
    ]
    if not works:
        return None
    return all(
        work["retired"] or (until_ns is not None and work["time_created_ns"] > until_ns)
        for work in works
    )


def _at_rest() -> bool:
    """Whether only Python's own threads run: then work that the script waited for is over."""
    known = {thread.native_id for thread in threading.enumerate()}
    return not any(
        _runs(task) for task in Path("/proc/self/task").glob("*") if int(task.name) not in known
    )


def _runs(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False  # it has ended meanwhile
