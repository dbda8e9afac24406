"""A run that goes on: its status and its figures so far, by the rules of a run that has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from stepscope.explain.hang import hang_now
from stepscope.explain.whole_run.rank_run import explain_run
from stepscope.explain.whole_run.stalls import find_steady
from stepscope.records.normal import median
from stepscope.records.rank import StepColumns
from stepscope.records.run import LiveRank, LiveRun, LiveStatus, RankRun, RunTimes
from stepscope.step.statistics import lower_median
from stepscope.text.figures import factor, long_duration
from stepscope.text.words import counted
from stepscope.trace.run_folder.run_state import exit_code_words, was_killed

if TYPE_CHECKING:
    from stepscope.trace.run_folder.follow_run import FollowedRank, FollowedRun

    _Process = tuple[int, int]

_RECENT_NS = 10_000_000_000
# No step for this long looks like a hang: in seconds, median steps and longest steps.
_HANG_S, _HANG_MEDIANS, _HANG_LONGEST = 10.0, 20.0, 3.0
_SAVING_S = 120.0  # saving a window or a memory snapshot may take this long
_CLOCK_AHEAD_S = 2.0
# Explaining a rank takes tens of milliseconds: a look takes few, with 1% more steps or more.
MOST_ANEW, _NEW_STEPS = 4, 0.01
OWN_PARTS = ("evaluation", "checkpoint", "between_epochs")  # as in account.py


def explain_live(
    followed: FollowedRun,
    now: float,
    before: LiveRun | None = None,
    *,
    most_anew: int = MOST_ANEW,
) -> LiveRun:
    """`now` is the Unix time. With `before`, the last look at the run, few ranks are explained
    anew, and only those with enough new steps to matter; counts and rates are always new."""
    last, earlier = _split_attempts(followed.ranks)
    has_ended = followed.run is not None and followed.run.ended_unix is not None
    known = _still_good(followed.ranks, before, most_anew) if before and not has_ended else {}
    current = tuple(_live_rank(rank, now, known, has_ended=has_ended) for rank in last)
    status, detail = _status(followed, last, current, now)
    # Wall time of the command; of its steps, where nobody noted when it began.
    run = followed.run
    if run is not None and run.started_unix:
        end = run.ended_unix or (now if followed.state != "gone" else _last_end_s(followed))
        seconds = max(0.0, end - run.started_unix)
    else:
        seconds = max((rank.steps.wall_ns / 1e9 for rank in followed.ranks), default=0.0)
    return LiveRun(
        folder=str(followed.folder),
        status=status,
        detail=detail,
        seconds=seconds,
        command=tuple(followed.run.command) if followed.run else (),
        exit_code=followed.run.exit_code if followed.run else None,
        ranks=current,
        earlier=tuple(_live_rank(rank, now, known, has_ended=False) for rank in earlier),
        world_size=max((rank.facts.world_size or 1 for rank in last), default=None),
        notes=tuple(_notes(last, current, now)),
    )


def _still_good(
    ranks: Sequence[FollowedRank], before: LiveRun, most_anew: int
) -> dict[_Process, LiveRank]:
    """Ranks whose figures of the last look stay. The rank that is shown in detail, and then those
    with most new steps, are explained anew."""
    known = {_process(rank.run): rank for rank in (*before.ranks, *before.earlier)}
    shown = _process(before.by_mean[0].run) if before.ranks else None
    growth = {}
    for rank in ranks:
        process = rank.rank, rank.attempt
        if process in known:
            growth[process] = rank.steps.seen / max(1, known[process].explained_steps) - 1
    order = sorted(growth, key=lambda process: (process != shown, -growth[process]))
    anew = [process for process in order if growth[process] >= _NEW_STEPS][:most_anew]
    return {process: known[process] for process in growth if process not in anew}


def _process(run: RankRun) -> _Process:
    return run.rank, run.attempt


def _split_attempts(
    ranks: Sequence[FollowedRank],
) -> tuple[list[FollowedRank], list[FollowedRank]]:
    """The processes that count now, and those that a later process of their rank replaced. Two
    processes that train at the same time only call themselves the same rank."""
    ordered = sorted(ranks, key=lambda rank: (rank.rank, rank.attempt))
    replaced = [
        one.rank == two.rank and one.state != "running" and _follows(one, two)
        for one, two in pairwise(ordered)
    ]
    last = [rank for rank, gone in zip(ordered, [*replaced, False], strict=False) if not gone]
    earlier = [rank for rank, gone in zip(ordered, replaced, strict=False) if gone]
    return last, sorted(earlier, key=lambda rank: (rank.attempt, rank.rank))


def _follows(one: FollowedRank, two: FollowedRank) -> bool:
    """Whether `two` began after `one` had ended; a process without steps cannot say."""
    before, after = one.steps.recent, two.steps.kept
    if not len(before) or not len(after):
        return True
    return bool(after.end_unix_ns[0] - after.wall_ns[0] >= before.end_unix_ns[-1])


def _last_end_s(followed: FollowedRun) -> float:
    ends = [rank.steps.recent.end_unix_ns[-1] for rank in followed.ranks if rank.steps.seen]
    return float(max(ends, default=0)) / 1e9


# One rank.


def _live_rank(
    rank: FollowedRank, now: float, known: Mapping[_Process, LiveRank], *, has_ended: bool
) -> LiveRank:
    steps, recent = rank.steps, rank.steps.recent
    if not steps.seen:
        run = RankRun(rank=rank.rank, attempt=rank.attempt, steps=0, warm_up=0, times=None)
        return LiveRank(run=run, kept=0)
    figures = known.get((rank.rank, rank.attempt)) or _figures(rank, has_ended=has_ended)
    end_ns = int(recent.end_unix_ns[-1])
    # The last whole steps that together took ten seconds; at least one.
    backwards = np.cumsum(recent.wall_ns[recent.whole][::-1])
    if not len(backwards):
        recent_steps_per_s = None
    else:
        count = max(1, int(np.searchsorted(backwards, _RECENT_NS, side="right")))
        recent_steps_per_s = 1e9 * count / float(backwards[count - 1])
    return replace(
        figures,
        run=replace(figures.run, steps=steps.seen),
        last_step=int(recent.number[-1]),
        quiet_s=max(0.0, now - end_ns / 1e9) if end_ns > 0 else None,
        steps_per_s=1e9 * steps.whole / steps.whole_ns if steps.whole_ns else None,
        recent_steps_per_s=recent_steps_per_s,
        memory_bytes=_last_memory(recent),
        on_device=recent.device_ns is not None,
        windows=steps.windows,
        seconds=steps.wall_ns / 1e9,
    )


def _figures(rank: FollowedRank, *, has_ended: bool) -> LiveRank:
    """What takes long to compute and changes slowly."""
    steps, columns = rank.steps, rank.steps.kept
    # A run that goes on counts up to its last step: what follows may become a step, or the
    # end.
    if rank.times is None or has_ended:
        times: RunTimes | None = rank.times
    else:
        times = replace(rank.times, ended_ns=int(rank.steps.recent.end_unix_ns[-1]), notes=())
    is_sample = len(columns) < steps.seen
    run = explain_run(columns, rank=rank.rank, times=None if is_sample else times)
    # The account's; where steps are a sample, their share of training stands for all of
    # them.
    if run.account is not None:
        goodput: float | None = run.account.goodput if run.account.wall_ms else None
    else:
        kept = steps.kept
        own = kept.wall_ns - sum(kept.phases_ns.get(phase, 0) for phase in OWN_PARTS)
        steady, _ = find_steady(kept)
        share = float(own[steady].sum()) / max(1.0, float(kept.wall_ns.sum()))
        wall_ns = times.ended_ns - times.began_ns if times is not None else steps.wall_ns
        goodput = min(1.0, share * steps.wall_ns / wall_ns) if wall_ns > 0 else None
    return LiveRank(
        run=replace(run, attempt=rank.attempt),
        kept=len(columns),
        explained_steps=steps.seen,
        phases_ms=_typical_phases(columns, run),
        goodput=goodput,
    )


def _last_memory(recent: StepColumns) -> int | None:
    """Not every step is asked for it."""
    if recent.allocated_bytes is None:
        return None
    known = recent.allocated_bytes[recent.allocated_bytes >= 0]
    return int(known[-1]) if len(known) else None


def _typical_phases(columns: StepColumns, run: RankRun) -> dict[str, float]:
    """Means over the steady steps that are no stalls and follow no epoch's end."""
    if run.series is None or run.times is None:
        return {}
    steady, _ = find_steady(columns)
    calm = steady & (run.series.cause < 0)
    if columns.epoch_gap_ns is not None:
        calm &= columns.epoch_gap_ns == 0
    if not calm.any():
        return {}
    means = {phase: float(column[calm].mean()) / 1e6 for phase, column in columns.phases_ns.items()}
    return {phase: ms for phase, ms in means.items() if ms > 0}


# The whole run.


def _status(
    followed: FollowedRun, ranks: Sequence[FollowedRank], live: Sequence[LiveRank], now: float
) -> tuple[LiveStatus, str]:
    run = followed.run
    if run is not None and run.status == "finished":
        code = run.exit_code or 0
        if not code:
            return "finished", "the command ended with exit code 0"
        status: LiveStatus = "killed" if was_killed(code) else "failed"
        return status, f"the command ended with {exit_code_words(code)}"
    states = {rank.state for rank in ranks}
    runs = followed.state == "running" or "running" in states
    if not runs and followed.state in ("gone", "restarted"):
        why = "with its machine" if followed.state == "restarted" else "without closing the run"
        return "killed", f"stepscope run ended {why}"
    if not runs and states == {"ended"}:
        return "finished", "every process has closed its files"
    if not runs and states and states <= {"ended", "gone", "restarted"}:
        return "killed", "its processes ended without closing their files"
    if not any(rank.last_step is not None for rank in live):
        answer = hang_now(followed.folder, now)
        if answer is not None and answer.is_hang:
            return "seems to hang", answer.verdict
        return "starting up", "no step has ended"
    if followed.state == "running" and states <= {"ended", "gone"}:
        return "shutting down", "every process has ended; the command ends, or starts again"
    return _progress(followed, ranks, live, now, runs=runs)


def _progress(
    followed: FollowedRun,
    ranks: Sequence[FollowedRank],
    live: Sequence[LiveRank],
    now: float,
    *,
    runs: bool,
) -> tuple[LiveStatus, str]:
    """Whether steps still come, by the rank that ended one last."""
    quiet = [rank.quiet_s for rank in live if rank.quiet_s is not None]
    if not quiet:
        return "training", "the capture does not say when its steps ended"
    silent_s = min(quiet)
    median_s = max(_median_s(rank.steps.recent) for rank in ranks if rank.steps.seen)
    patience = max(_patience_s(rank.steps.recent) for rank in ranks if rank.steps.seen)
    if silent_s <= patience:
        return "training", f"the last step ended {long_duration(1e9 * silent_s)} ago"
    times = f"{factor(silent_s / median_s)} times the median step" if median_s else ""
    detail = f"no step for {long_duration(1e9 * silent_s)}, {times}".removesuffix(", ")
    if runs:
        answer = hang_now(followed.folder, now)
        if answer is not None and answer.kind == "slow":
            return "training", answer.verdict
        return "seems to hang", answer.verdict if answer is not None else detail
    return "unknown", f"{detail}; whether the job still runs cannot be seen from here"


def _median_s(recent: StepColumns) -> float:
    return median(recent.wall_ns) / 1e9


def _patience_s(recent: StepColumns) -> float:
    """How long no step may end before the job seems to hang."""
    longest = float(recent.wall_ns[recent.whole].max(initial=0)) / 1e9
    saving = _SAVING_S if recent.window[-1] or recent.memory[-1] else 0.0
    return max(_HANG_S, _HANG_MEDIANS * _median_s(recent), _HANG_LONGEST * longest, saving)


def _notes(ranks: Sequence[FollowedRank], live: Sequence[LiveRank], now: float) -> list[str]:
    notes = []
    unread = sum(rank.steps.unread for rank in ranks)
    if unread:
        notes.append(f"{counted(unread, 'line')} of steps could not be read")
    ahead = max(
        (
            (
                float(rank.steps.recent.end_unix_ns[-1]) / 1e9 - now
                if len(rank.steps.recent)
                else 0.0
            )
            for rank in ranks
        ),
        default=0.0,
    )
    if ahead > _CLOCK_AHEAD_S:
        notes.append(f"the job's clock is {long_duration(1e9 * ahead)} ahead of this machine's")
    if any(rank.kept < rank.explained_steps for rank in live):
        kept, steps = sum(rank.kept for rank in live), sum(rank.run.steps for rank in live)
        notes.append(f"figures rest on a sample: {kept:,} of {counted(steps, 'step')}")
    return notes


# Which rank of a running job makes the others wait, by the phases of their typical steps.
#
# Ranks that wait for each other take the same time, and wait in backward. A rank that spends longer
# than the others before it (data, forward) or between (optimizer, other) is the one they wait for.
# Only the collectives of a window prove it: see the findings.

OWN_PHASES = ("data", "forward", "optimizer", "other")  # in which a rank waits for no other
_LEAST_SHARE, _LEAST_MS = 0.05, 0.2  # of the typical step; noise is smaller
_FEWEST_STEPS = 10  # steady ones: of fewer, one long step decides the mean


class LongPhase(NamedTuple):
    """How much longer than the median rank this one spends in one phase."""

    rank: int
    phase: str
    extra_ms: float


def find_late_ranks(ranks: Sequence[LiveRank]) -> tuple[LongPhase, ...]:
    """The latest first; ranks with few steady steps do not count."""
    known = [
        rank
        for rank in ranks
        if rank.phases_ms
        and (rank.run.times.steps if rank.run.times is not None else 0) >= _FEWEST_STEPS
    ]
    if len(known) < 2:
        return ()
    typical_ms = max(sum(rank.phases_ms.values()) for rank in known)
    least = max(_LEAST_SHARE * typical_ms, _LEAST_MS)
    # The lower median: of two ranks, the faster one's.
    usual = {
        phase: lower_median([rank.phases_ms.get(phase, 0.0) for rank in known])
        for phase in OWN_PHASES
    }
    late = [
        LongPhase(rank.run.rank, phase, extra)
        for rank in known
        for phase, ms in usual.items()
        if (extra := rank.phases_ms.get(phase, 0.0) - ms) > least
    ]
    return tuple(sorted(late, key=lambda one: -one.extra_ms))
