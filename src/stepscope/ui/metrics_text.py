"""Running jobs as Prometheus reads them: the text format, version 0.0.4.

Labels are bounded: a run, at most MOST_RANKS ranks, and words of closed sets (phases, causes of
stalls, statuses, ids of findings).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stepscope.ui.live_words import samples_per_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stepscope.records.live_run import LiveRank, LiveRun, VerdictNow
    from stepscope.records.whole_run import Stall

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
    """One block per metric that has a value."""
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
        number = str(rank.run.rank)
        if rank.run.attempt > 1:
            number = f"{number}.{rank.run.attempt}"
        yield from _rank_samples(rank, {**labels, "rank": number})
    yield _Sample("stepscope_samples_per_second", labels, samples_per_s(run, measured.verdict))
    if measured.verdict is not None and not measured.verdict.failed:
        yield from _verdict_samples(measured.verdict, labels)


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
        yield _Sample("stepscope_stall_seconds", {**labels, "cause": stall.cause}, _stall_s(stall))


def _stall_s(stall: Stall) -> float:
    return (stall.cost_ms + stall.between_epochs_ms) / 1e3


def _verdict_samples(verdict: VerdictNow, labels: Mapping[str, str]) -> Iterator[_Sample]:
    yield _Sample("stepscope_mfu_ratio", labels, verdict.mfu)
    yield _Sample("stepscope_peak_memory_bytes", labels, verdict.peak_bytes)
    for finding in verdict.findings:
        own = {**labels, "finding": finding.id, "severity": finding.severity}
        yield _Sample("stepscope_finding", own, 1)
    first = verdict.findings[0].id if verdict.findings else "none"
    yield _Sample("stepscope_verdict", {**labels, "finding": first}, 1)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    """Names of folders may hold anything, also bytes that are no text."""
    text = value.encode("utf-8", "replace").decode()
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
