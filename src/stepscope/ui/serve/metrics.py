"""Write running jobs as Prometheus reads them, text format 0.0.4, for `serve` and for `run
--metrics-file`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope.errors import StepscopeError, UsageError
from stepscope.explain.whole_run.live import explain_live
from stepscope.measure.folder import why_refused
from stepscope.records.explanation import Explanation, RankExplanation
from stepscope.records.run import FindingNow, LiveRank, LiveRun, VerdictNow
from stepscope.trace.run_folder.follow_run import RunFollower
from stepscope.ui.serve.listed_runs import run_id
from stepscope.ui.words import one_line, rank_name, samples_per_s

if TYPE_CHECKING:
    from stepscope.ui.jobs.process import News

# Labels are bounded: a run, at most MOST_RANKS ranks, and words of closed sets (phases, causes of
# stalls, statuses, ids of findings).

MOST_RANKS = 64  # of a run: the slowest

# name -> (type, what it is); docs/how-to/loggers.md has the same table
METRICS = {
    "stepscope_run_status": ("gauge", "1 for the status that the run has now"),
    "stepscope_run_seconds": ("gauge", "Wall time of the command so far"),
    "stepscope_steps_total": ("counter", "Training steps that have ended"),
    "stepscope_step_seconds_total": (
        "counter",
        "Time from the first step's start to the last step's end",
    ),
    "stepscope_step_recent_seconds": ("gauge", "Mean step of the last ten seconds"),
    "stepscope_step_mean_seconds": ("gauge", "Mean of the steady steps"),
    "stepscope_step_p99_seconds": ("gauge", "99th percentile of the steady steps"),
    "stepscope_phase_seconds": ("gauge", "A typical step by phase, on the CPU"),
    "stepscope_stall_seconds": ("gauge", "Stalls by cause, per average step"),
    "stepscope_goodput_ratio": ("gauge", "Steady training over wall time"),
    "stepscope_memory_bytes": ("gauge", "Memory in use when the last step ended"),
    "stepscope_quiet_seconds": ("gauge", "Time since the last step ended"),
    "stepscope_windows_total": ("counter", "Profiler windows recorded"),
    "stepscope_samples_per_second": ("gauge", "Samples of all ranks, by the last ten seconds"),
    "stepscope_mfu_ratio": ("gauge", "Model FLOPs utilisation in the last explained window"),
    "stepscope_peak_memory_bytes": ("gauge", "Peak of memory in the last memory step"),
    "stepscope_finding": ("gauge", "1 for each finding of the last explained window"),
    "stepscope_verdict": ("gauge", "1 for the finding that decides the verdict; none: healthy"),
    "stepscope_runs_left_out": ("gauge", "Running jobs that are not listed here"),
}


class RunMetrics(NamedTuple):
    """A run, and the labels that name it."""

    labels: Mapping[str, str]
    run: LiveRun
    verdict: VerdictNow | None = None


class _Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float | None


def metrics_text(runs: Sequence[RunMetrics], *, left_out: int = 0) -> str:
    """Write one block per metric that has a value."""
    samples = [sample for run in runs for sample in _samples(run)]
    samples.append(_Sample("stepscope_runs_left_out", {}, left_out))
    lines: list[str] = []
    for name, (kind, help_text) in METRICS.items():
        own = [one for one in samples if one.name == name and one.value is not None]
        if own:
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels(one.labels)} {one.value!r}" for one in own]
    return "\n".join(lines) + "\n"


def _samples(measured: RunMetrics) -> Iterator[_Sample]:
    run, labels = measured.run, measured.labels
    yield _Sample("stepscope_run_status", {**labels, "status": run.status}, 1)
    yield _Sample("stepscope_run_seconds", labels, run.seconds)
    for rank in run.by_mean[:MOST_RANKS]:
        yield from _rank_samples(rank, {**labels, "rank": rank_name(rank.run)})
    verdict = measured.verdict
    yield _Sample("stepscope_samples_per_second", labels, samples_per_s(run, verdict))
    if verdict is None or verdict.failed:
        return
    yield _Sample("stepscope_mfu_ratio", labels, verdict.mfu)
    yield _Sample("stepscope_peak_memory_bytes", labels, verdict.peak_bytes)
    for finding in verdict.findings:
        own = {**labels, "finding": finding.id, "severity": finding.severity}
        yield _Sample("stepscope_finding", own, 1)
    first = verdict.findings[0].id if verdict.findings else "none"
    yield _Sample("stepscope_verdict", {**labels, "finding": first}, 1)


def _rank_samples(rank: LiveRank, labels: Mapping[str, str]) -> Iterator[_Sample]:
    times, rate = rank.run.times, rank.recent_steps_per_s
    values = {
        "steps_total": rank.run.steps,
        "step_seconds_total": rank.seconds,
        "step_recent_seconds": 1 / rate if rate else None,
        "step_mean_seconds": times.mean_ms / 1e3 if times else None,
        "step_p99_seconds": times.p99_ms / 1e3 if times else None,
        "goodput_ratio": rank.goodput,
        "memory_bytes": rank.memory_bytes,
        "quiet_seconds": rank.quiet_s,
        "windows_total": rank.windows,
    }
    for name, value in values.items():
        yield _Sample(f"stepscope_{name}", labels, value)
    for phase, ms in rank.phases_ms.items():
        yield _Sample("stepscope_phase_seconds", {**labels, "phase": phase}, ms / 1e3)
    for stall in rank.run.stalls:
        seconds = (stall.cost_ms + stall.between_epochs_ms) / 1e3
        yield _Sample("stepscope_stall_seconds", {**labels, "cause": stall.cause}, seconds)


def _labels(labels: Mapping[str, str]) -> str:
    """Write labels; names of folders may hold anything, also bytes that are no text."""
    pairs = []
    for name, value in labels.items():
        text = value.encode("utf-8", "replace").decode().replace("\\", "\\\\")
        text = text.replace("\n", "\\n").replace('"', '\\"')
        pairs.append(f'{name}="{text}"')
    return "{" + ",".join(pairs) + "}" if pairs else ""


# `run --metrics-file`: the running job's metrics in a file that a node exporter reads.
#
# The file is replaced as a whole. Only the run folder is read, so the job does not know of it.

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

    pause_s, gives_up = 0.2, False

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
        """Return why the file could not be written, said once."""
        from stepscope.ui.html.render import write_atomically  # it takes a while to import

        try:
            self._run = explain_live(self._follower.read(), time.time(), self._run)
            verdict = brief_verdict(explanation) if explanation is not None else None
            labels = {"run": run_id(self._folder), "name": self._folder.absolute().name}
            write_atomically(self._path, metrics_text([RunMetrics(labels, self._run, verdict)]))
        except (OSError, StepscopeError) as error:
            why = why_refused(error) if isinstance(error, OSError) else str(error)
            said, self._failed = self._failed, True
            return None if said else f"--metrics-file {self._path} cannot be written: {why}"
        self._failed = False
        return None


# An explanation in a few figures, for what shows many runs or a run that goes on.

_MOST_FINDINGS = 4
_MOST_TEXT = 600


class _Efficiency(msgspec.Struct, frozen=True):
    mfu: float | None = None


class _Batch(msgspec.Struct, frozen=True):
    batch: int | None = None
    batches_per_step: int | None = 1


class _Memory(msgspec.Struct, frozen=True):
    peak_bytes: int | None = None
    largest_batch: _Batch | None = None


class _Rank(msgspec.Struct, frozen=True):
    efficiency: _Efficiency | None = None
    memory: _Memory | None = None


class ExplainedJson(msgspec.Struct, frozen=True):
    """What is needed of `explain --json`; names as in Explanation."""

    verdict: str = ""
    ranks: list[_Rank] = []
    findings: list[FindingNow] = []


def brief_verdict(explained: Explanation | ExplainedJson) -> VerdictNow:
    """Return the least MFU, the largest peak and the first findings of all ranks."""
    memories = [rank.memory for rank in explained.ranks if rank.memory]
    batches = [memory.largest_batch for memory in memories if memory.largest_batch]
    peaks = [memory.peak_bytes for memory in memories if memory.peak_bytes is not None]
    samples = [
        (one.batch or 0) * (one.batches_per_step or 0) for one in batches
    ]  # of a rank's step
    return VerdictNow(
        verdict=_short(explained.verdict),
        findings=tuple(
            FindingNow(id=one.id, summary=_short(one.summary), severity=one.severity)
            for one in explained.findings[:_MOST_FINDINGS]
        ),
        mfu=least_mfu(explained.ranks),
        peak_bytes=max(peaks, default=None),
        batch=next(filter(None, samples), None),
    )


def least_mfu(ranks: Sequence[RankExplanation] | Sequence[_Rank]) -> float | None:
    """Return that of the rank that uses its device least: the others wait for it."""
    known = [rank.efficiency.mfu for rank in ranks if rank.efficiency]
    return min((mfu for mfu in known if mfu is not None), default=None)


def _short(text: str) -> str:
    return one_line(text)[:_MOST_TEXT]
