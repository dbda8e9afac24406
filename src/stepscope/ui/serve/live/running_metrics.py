"""/metrics: the runs that go on below the served folder."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from stepscope.records.process_identity import process_state
from stepscope.trace.decode import Oddities
from stepscope.trace.follow_run import RunSoFar
from stepscope.trace.run_state import RUN
from stepscope.trace.side_files import read_record
from stepscope.ui.metrics_text import RunMetrics, metrics_text
from stepscope.ui.serve.live.job_follower import RunLooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

MOST_RUNS = 32
_SCAN_S = 5.0  # a scan of thousands of folders takes a while
_SILENT_S = 600.0  # without run.json, steps that are older say that nothing runs


class ListedRun(Protocol):
    """A folder below the served one."""

    @property
    def id(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def kind(self) -> str: ...
    @property
    def stamp(self) -> str: ...


class RunningMetrics:
    """Reads each running folder on, from scrape to scrape. Safe to use from several threads."""

    def __init__(
        self,
        scan: Callable[[], Iterable[ListedRun]],
        looks_of: Callable[[str], RunLooks | None],
    ) -> None:
        self._scan, self._looks_of = scan, looks_of
        self._lock = threading.Lock()
        self._scanned_at = float("-inf")
        self._listed: list[ListedRun] = []
        self._ended: dict[str, str] = {}  # stamps of runs that had ended
        self._own: dict[str, RunLooks] = {}  # of runs that no browser follows

    def text(self) -> str:
        with self._lock:
            if time.monotonic() - self._scanned_at >= _SCAN_S:
                self._listed = [one for one in self._scan() if one.kind == "run"]
                self._scanned_at = time.monotonic()
            running = [one for one in self._listed if not self._has_ended(one)]
            runs = [run for one in running[:MOST_RUNS] if (run := self._measure(one)) is not None]
            self._forget({one.id for one in running[:MOST_RUNS]})
        return metrics_text(runs, left_out=max(0, len(running) - MOST_RUNS))

    def close(self) -> None:
        with self._lock:
            self._forget(set())

    def _has_ended(self, listed: ListedRun) -> bool:
        if self._ended.get(listed.id) == listed.stamp:
            return True
        if _is_running(listed.path):
            return False
        self._ended[listed.id] = listed.stamp
        return True

    def _measure(self, listed: ListedRun) -> RunMetrics | None:
        looks = self._looks_of(listed.id)
        if looks is None:
            looks = self._own.get(listed.id) or self._own.setdefault(
                listed.id, RunLooks(listed.path)
            )
            looks.look(time.monotonic(), time.time())
        if looks.run is None:
            return None
        labels = {"run": listed.id, "name": listed.path.name}
        return RunMetrics(labels=labels, run=looks.run, verdict=looks.verdict)

    def _forget(self, running: set[str]) -> None:
        for run_id in self._own.keys() - running:
            self._own.pop(run_id).close()


def _is_running(folder: Path) -> bool:
    run = read_record(folder / RUN, RunSoFar, Oddities(RUN))
    if run is None:
        return _wrote_lately(folder)
    if run.status != "running":
        return False
    return run.process is None or process_state(run.process) in ("running", "unknown")


def _wrote_lately(folder: Path) -> bool:
    try:
        changed = (folder / "rank-00000" / "steps.jsonl").stat().st_mtime
    except OSError:
        return False
    return time.time() - changed < _SILENT_S
