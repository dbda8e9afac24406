"""Collectives of the profiler window, and how the job is laid out to need them.

Everything is read from what torch records anyway (flight.py, parallel.py), without hooks in the
communication itself. A DDP bucket is ready when its all-reduce is created; its end is in the trace.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from stepscope.measure import flight, parallel
from stepscope.measure.never_raise import never_raise
from stepscope.records.figures import signed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
        parallel.watch_replicas()

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
            "placements": parallel.placements(parameters),
            "trained": parallel.trained(parameters),
            "rpc": parallel.uses_rpc(),
            "libraries": parallel.exchanging_libraries(),
            **((parallel.shards_and_stages() if spread else None) or {}),
            "nccl_version": parallel.nccl_version() if nccl else None,
            "flight_recorder": self._recorders,
            "notes": list(self._notes),
        }

    @never_raise
    def _collect(self, marks: list[tuple[int, int]], last: int) -> list[dict[str, Any]]:
        end_ns = self._now()
        self._check_clock()
        self._read_groups()
        sizes = {group["name"]: group["size"] for group in self._groups}
        lines = {}
        for entry in self._entries(since_ns=marks[0][0]):
            created_ns = entry["time_created_ns"]
            if marks[0][0] <= created_ns <= end_ns:
                step = min(flight.step_at(marks, created_ns), last)
                line = flight.as_line(entry, sizes, step)
                lines[flight.identity(line)] = line
        ordered = sorted(lines.values(), key=lambda line: int(line["created_ns"]))
        for replica in self._replicas:
            flight.name_buckets(ordered, replica)
        return ordered

    def _entries(self, *, since_ns: int) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        for name, dump in flight.recorders():
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
        groups = parallel.groups()
        if not groups:
            return
        self._groups = groups
        if any("gloo" in group["backend"] for group in groups):
            self._note("the flight recorder does not record gloo's sends and receives")
        replicas = parallel.replicas()
        if not replicas and not self._searched:
            self._searched = True
            parallel.search_replicas()
            replicas = parallel.replicas()
        if replicas:
            self._replicas = replicas
            self._note(_NO_HOOK)

    def _check_clock(self) -> None:
        moved = self._now() - time.perf_counter_ns() - self._unix_less_perf
        if abs(moved) > _CLOCK_MOVED_NS:
            self._note(
                f"the wall clock was set by {signed(moved / 1e6)} ms in the window: "
                "collectives may be missing or assigned to the wrong step"
            )

    def _note(self, text: str) -> None:
        self._notes.setdefault(text)
