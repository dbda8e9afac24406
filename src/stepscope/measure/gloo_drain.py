"""When the profiler may stop: not while gloo still works on collectives that it has seen.

torch's profiler frees its events when it stops. A collective of gloo ends in a thread of gloo's,
which then writes that end into its event, wherever that is by now: the heap is damaged and the
process dies there or later (torch 2.13 and before, with nothing but torch's own profiler too). DDP
goes on as soon as the sums are there, a moment before that end is written; a rank whose gloo thread
has to wait for a core is still in that moment when its step is over. No recorder keeps gloo's sends
and receives: one that the script waits for only behind the window is not known here.
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
_SETTLE_S = 0.1  # where the recorder cannot tell
_RECORDER = "_dump_fr_trace_json"  # gloo's; NCCL's collectives end where they are launched


def collectives_ended(patience_s: float = PATIENCE_S, *, until_ns: int | None = None) -> bool:
    """Wait until gloo has put away all it was given (until then, by the wall clock).

    False where it has not after that long.
    """
    try:
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available():
            return True
        groups = parallel.groups() or []
        gloo = any("gloo" in group["backend"] for group in groups)
        # A group that was destroyed may have left works behind: only the recorder knows of them.
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
    """By torch's flight recorder, where gloo retires a work behind its last touch of the profiler.

    None where it has nothing of gloo's: it is off, or older than gloo's use of it.
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
    """No thread but Python's own is running: a work that the script has waited for is over."""
    known = {thread.native_id for thread in threading.enumerate()}
    return not any(
        _runs(task) for task in Path("/proc/self/task").glob("*") if int(task.name) not in known
    )


def _runs(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False  # it has ended meanwhile
