"""The collectives of the profiler window, how the job is laid out to need them, and the wait
for gloo before the profiler stops.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from stepscope.measure.cluster import flight_recorder, parallel_layout
from stepscope.measure.never_raise import never_raise, note
from stepscope.text.figures import signed

# Everything is read from what torch records anyway, without hooks in the communication itself. A
# DDP bucket is ready when its all-reduce is created; its end is in the trace.

_CLOCK_MOVED_NS = 1_000_000
_NO_HOOK = (
    "no communication hook was registered: DDP accepts only one, and a hook could change the "
    "training's bits. A bucket counts as ready when its all-reduce was created. Its end is in the "
    "trace"
)


class Comms:
    """Collects the collectives of each profiler window, and describes the job."""

    def __init__(self, *, now: Callable[[], int] = time.time_ns) -> None:
        self._now = now
        self._marks: list[tuple[int, int]] = []  # when each step of the window began
        self._unix_less_perf = 0
        self._groups: list[dict[str, Any]] = []
        self._replicas: list[dict[str, Any]] = []
        self._recorders: dict[str, int] = {}
        self._searched = False
        self._notes: dict[str, None] = {}

    @never_raise
    def attach(self) -> None:
        """Remember DDP instances as they are created. May be called again."""
        parallel_layout.watch_replicas()

    def window_begins(self, step: int) -> None:
        began = self._now()
        self._unix_less_perf = began - time.perf_counter_ns()
        self._marks = [(began, step)]

    def step_begins(self, step: int) -> None:
        """Another step of the window begins; does nothing outside one."""
        if self._marks:
            self._marks.append((self._now(), step))

    def window_ends(self, step: int) -> list[dict[str, Any]]:
        """The window's last step has ended: its collectives, in the order they were created."""
        marks, self._marks = self._marks, []
        return (self._collect(marks, step) if marks else None) or []

    @never_raise
    def group_ends(self) -> None:
        """The process group is about to be destroyed: read it now."""
        self._read_groups()

    def describe(self, parameters: Iterable[Any] = ()) -> dict[str, Any]:
        """Groups, replicas, shards, versions; `parameters` are those that the optimizers hold."""
        self.group_ends()
        parameters = list(parameters)
        nccl = any("nccl" in group["backend"] for group in self._groups)
        spread = any(group["size"] > 1 for group in self._groups)
        return {
            "groups": self._groups,
            "ddp": self._replicas,
            "placements": parallel_layout.placements(parameters),
            "trained": parallel_layout.trained(parameters),
            "rpc": parallel_layout.uses_rpc(),
            "libraries": parallel_layout.exchanging_libraries(),
            **((parallel_layout.shards_and_stages() if spread else None) or {}),
            "nccl_version": parallel_layout.nccl_version() if nccl else None,
            "flight_recorder": self._recorders,
            "notes": list(self._notes),
        }

    @never_raise
    def _collect(self, marks: list[tuple[int, int]], last: int) -> list[dict[str, Any]]:
        end_ns = self._now()
        moved = self._now() - time.perf_counter_ns() - self._unix_less_perf
        if abs(moved) > _CLOCK_MOVED_NS:
            self._note(
                f"the wall clock was set by {signed(moved / 1e6)} ms in the window: "
                "collectives may be missing or assigned to the wrong step"
            )
        self._read_groups()
        sizes = {group["name"]: group["size"] for group in self._groups}
        lines = {}
        for entry in self._entries(since_ns=marks[0][0]):
            created_ns = entry["time_created_ns"]
            if marks[0][0] <= created_ns <= end_ns:
                step = min(flight_recorder.step_at(marks, created_ns), last)
                line = flight_recorder.as_line(entry, sizes, step)
                lines[flight_recorder.identity(line)] = line
        ordered = sorted(lines.values(), key=lambda line: int(line["created_ns"]))
        for replica in self._replicas:
            flight_recorder.name_buckets(ordered, replica)
        return ordered

    def _entries(self, *, since_ns: int) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        for name, dump in flight_recorder.recorders():
            recorded = json.loads(dump()).get("entries") or []
            self._recorders[name] = len(recorded)
            if (
                recorded
                and recorded[0]["record_id"] > 0
                and recorded[0]["time_created_ns"] > since_ns
            ):
                self._note(
                    f"the flight recorder holds only {len(recorded)} entries, so the window's "
                    "first collectives are lost. Set a larger TORCH_FR_BUFFER_SIZE"
                )
            entries += recorded
        if not entries and self._groups:
            self._note(
                "the flight recorder is empty or missing. Set TORCH_FR_BUFFER_SIZE=2000 to turn it "
                "on, if torch has one for this backend"
            )
        return entries

    def _read_groups(self) -> None:
        """Keep the groups and replicas: the group may be gone when `describe` is called."""
        groups = parallel_layout.groups()
        if not groups:
            return
        self._groups = groups
        if any("gloo" in group["backend"] for group in groups):
            self._note("the flight recorder does not record gloo's sends and receives")
        replicas = parallel_layout.replicas()
        if not replicas and not self._searched:
            self._searched = True
            parallel_layout.search_replicas()
            replicas = parallel_layout.replicas()
        if replicas:
            self._replicas = replicas
            self._note(_NO_HOOK)

    def _note(self, text: str) -> None:
        self._notes.setdefault(text)


# Waits until gloo has finished its collectives, so that the profiler can stop safely.
#
# torch's profiler frees its events when it stops. A gloo collective ends in a thread of gloo's,
# which then writes its end into the event. If that event is already freed, the heap is damaged and
# the process dies there or later (torch 2.13 and before; torch's own profiler alone causes it too).
# DDP continues as soon as the sums are there, a moment before that end is written; a rank whose
# gloo thread waits for a core is still in that moment when its step is over. No recorder keeps
# gloo's sends and receives: one that the script waits for only after the window is not known here.

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
        groups = parallel_layout.groups() or []
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
    dump = dict(flight_recorder.recorders()).get(_RECORDER)
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
