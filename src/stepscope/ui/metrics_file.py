"""`run --metrics-file`: the running job's metrics in a file that a node exporter reads.

The file is replaced as a whole. Only the run folder is read, so the job does not know of it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from stepscope.errors import StepscopeError, UsageError
from stepscope.explain.whole_run.live import explain_live
from stepscope.measure.folder import remove, temporary, why_refused
from stepscope.trace.follow_run import RunFollower
from stepscope.ui.brief_verdict import brief_verdict
from stepscope.ui.metrics_text import RunMetrics, metrics_text
from stepscope.ui.serve.runs_directory import run_id

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.explanation import Explanation
    from stepscope.records.live_run import LiveRun
    from stepscope.ui.job_process import News

INTERVAL_S = 5.0
ENDING = ".prom"  # a node exporter reads no other
_REST = 9  # times as long as a look took: at most a tenth of a core


def require_place(path: Path) -> None:
    """UsageError, before the command starts, where the file cannot be written."""
    if path.suffix != ENDING:
        raise UsageError(
            f"--metrics-file {path}: node exporters read only files that end with {ENDING}"
        )
    if path.is_dir():
        raise UsageError(f"--metrics-file {path} is a folder: name a file in it")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--metrics-file {path}: {path.parent} is no folder to write to")


class MetricsFile:
    """Polled while the command runs; passes on what `news` has to say."""

    def __init__(self, path: Path, folder: Path, news: News | None = None) -> None:
        self.done = False  # until the command ends
        self._path, self._folder, self._news = path, folder, news
        self._follower = RunFollower(folder)
        self._run: LiveRun | None = None
        self._due = 0.0
        self._failed = False

    def news(self) -> str | None:
        now = time.monotonic()
        if now >= self._due:
            failed = self.write()
            rest_s = _REST * (time.monotonic() - now)
            self._due = time.monotonic() + max(INTERVAL_S, rest_s)
            if failed:
                return failed
        return self._news.news() if self._news is not None and not self._news.done else None

    def write(self, explanation: Explanation | None = None) -> str | None:
        """Why the file could not be written, said once."""
        try:
            self._run = explain_live(self._follower.read(), time.time(), self._run)
            verdict = brief_verdict(explanation) if explanation is not None else None
            labels = {"run": run_id(self._folder), "name": self._folder.absolute().name}
            self._replace(metrics_text([RunMetrics(labels, self._run, verdict)]))
        except (OSError, StepscopeError) as error:
            why = why_refused(error) if isinstance(error, OSError) else str(error)
            said, self._failed = self._failed, True
            return None if said else f"--metrics-file {self._path} cannot be written: {why}"
        self._failed = False
        return None

    def _replace(self, text: str) -> None:
        unfinished = temporary(self._path)
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(self._path)
        except BaseException:
            remove(unfinished)
            raise
