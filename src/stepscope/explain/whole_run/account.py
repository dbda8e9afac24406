"""Where the command's wall time went, to the nanosecond: of one rank, of all ranks, of
attempts one after another, of a job on several hosts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.records.job import Job
from stepscope.records.normal import NORMAL_95, median
from stepscope.records.quality import Note
from stepscope.records.rank import USUAL_PHASES, RankWithoutTrace, StepColumns
from stepscope.records.run import (
    ACCOUNT,
    AccountPart,
    NotedSteps,
    RankRun,
    RankSpread,
    RunAccount,
    RunTimes,
    WholeRun,
)
from stepscope.step.arrays import Bools
from stepscope.text import figures
from stepscope.text.words import counted

# Steps follow each other: each begins where the one before ended. What lies before the first batch
# is start-up, what follows the last step is shut-down, and a gap between two steps is time that
# capture took for itself. Everything else is inside a step, and there each nanosecond belongs to
# one phase. So the account adds up to the wall time exactly, whatever was captured.

_OWN_PARTS = ("evaluation", "checkpoint", "between_epochs")
TRAINING_PHASES = (*USUAL_PHASES, "gc", "compile")
_FEWEST_NOTED = 4
_CLOCKS_APART = 0.001  # steps and their ends are read from two clocks, one after the other
_START_UP = ("launch", "imports", "process_group", "build", "first_batch")


class _Ledger(msgspec.Struct):
    """Nanoseconds by part of the account, and by the parts of some of them."""

    sums: dict[str, int]
    inner: dict[str, dict[str, int]] = {}

    def add(self, name: str, ns: int) -> None:
        self.sums[name] = self.sums.get(name, 0) + ns

    def add_compiling(self, name: str, ns: int, compiling_ns: int) -> None:
        """As `add`; what torch.compile took of it is a part of its own."""
        self.add(name, ns)
        parts = self.inner.setdefault(name, {"compile": 0, "other": 0})
        parts["compile"] += compiling_ns
        parts["other"] += ns - compiling_ns

    def divide(self, name: str, parts: dict[str, int]) -> None:
        self.inner[name] = parts
        self.add(name, sum(parts.values()))


def account_for(steps: StepColumns | None, warm_up: int, times: RunTimes) -> RunAccount:
    """`warm_up` steps are the first ones; they compile and autotune."""
    ledger = _Ledger(dict.fromkeys(ACCOUNT, 0), {})
    notes = list(times.notes)
    if steps is not None and len(steps):
        _add_steps(ledger, steps, warm_up)
        if (noted := find_noted(steps)) is not None:
            notes.append(noted_words(noted))
        begins = int(steps.end_unix_ns[0] - steps.wall_ns[0])
        first = {phase: int(column[0]) for phase, column in steps.phases_ns.items()}
        # The first step begins when our code is loaded. What is left of it is a first
        # step. Garbage collection there is that of imports: they create many objects.
        rest = dict(first)
        for name in _OWN_PARTS:  # a trainer may evaluate before it trains
            ledger.add(name, rest.pop(name, 0))
        start = {"launch": max(0, begins - times.began_ns), "first_batch": rest.pop("data", 0)}
        build = rest.pop("other", 0) + rest.pop("gc", 0)
        if times.first_batch_ns is None and rest.get("forward"):
            build += rest.pop("forward")
            notes.append("no data loader was seen: the first forward pass is counted as start-up")
        for name, ns in (("imports", times.imports_ns), ("process_group", times.group_ns)):
            start[name] = min(build, ns)
            build -= start[name]
        start["build"] = build
        ledger.divide("start_up", {name: start[name] for name in _START_UP})
        ledger.add_compiling("first_steps", sum(rest.values()), rest.get("compile", 0))
        _add_shut_down(ledger, int(steps.end_unix_ns[-1]), times)
    return _close(ledger, max(0, times.ended_ns - times.began_ns), notes)


def mean_account(accounts: Sequence[RunAccount]) -> RunAccount | None:
    """The mean over ranks; None without any. Accounts of one command share its wall time."""
    if not accounts:
        return None
    return RunAccount(
        wall_ms=_mean([account.wall_ms for account in accounts]),
        goodput=_mean([account.goodput for account in accounts]),
        parts=_mean_parts([account.parts for account in accounts]),
        notes=tuple(dict.fromkeys(note for account in accounts for note in account.notes)),
    )


def add_accounts(accounts: Sequence[RunAccount]) -> RunAccount:
    """Of attempts that followed each other."""
    wall = sum(account.wall_ms for account in accounts)
    mean = mean_account(accounts)
    if mean is None or len(accounts) == 1:
        return accounts[0]
    count = len(accounts)
    return RunAccount(
        wall_ms=wall,
        goodput=_ms(mean.parts, "training") * count / wall if wall else 0.0,
        parts=tuple(_stretch(part, count, wall) for part in mean.parts),
        notes=mean.notes,
    )


def widen_account(account: RunAccount, before_ns: int, after_ns: int) -> RunAccount:
    """Begin earlier and end later: other hosts had begun, or had not ended."""
    if not before_ns and not after_ns:
        return account
    wall = account.wall_ms + (before_ns + after_ns) / 1e6
    longer = {"start_up": before_ns / 1e6, "launch": before_ns / 1e6, "shut_down": after_ns / 1e6}
    parts = tuple(_lengthen(part, longer, wall) for part in account.parts)
    goodput = _ms(parts, "training") / wall if wall else 0.0
    return replace(account, wall_ms=wall, goodput=goodput, parts=parts)


def _lengthen(part: AccountPart, longer: dict[str, float], wall: float) -> AccountPart:
    ms = part.ms + longer.get(part.id, 0.0)
    inner = tuple(_lengthen(one, longer, wall) for one in part.parts)
    return AccountPart(id=part.id, ms=ms, share=ms / wall if wall else 0.0, parts=inner)


def _ms(parts: Sequence[AccountPart], name: str) -> float:
    return sum(part.ms for part in parts if part.id == name)


def _stretch(part: AccountPart, count: int, wall: float) -> AccountPart:
    ms = part.ms * count
    inner = tuple(_stretch(one, count, wall) for one in part.parts)
    return AccountPart(id=part.id, ms=ms, share=ms / wall if wall else 0.0, parts=inner)


def _add_steps(ledger: _Ledger, steps: StepColumns, warm_up: int) -> None:
    """All steps but the first, which belongs to start-up in part. What the script would have done
    without us is never a window's: it may evaluate or compile in a step that we record."""
    place = np.arange(len(steps))
    ours = (steps.window | steps.memory) & (place > 0)
    plain = ~ours & (place > 0)
    warm = place < warm_up
    steady = plain & ~warm
    special = np.zeros(len(steps), np.int64)
    for name in _OWN_PARTS:
        if (column := steps.phases_ns.get(name)) is not None:
            ledger.add(name, int(column[place > 0].sum()))
            special += column
    rest = steps.wall_ns - special
    compiling = steps.phases_ns.get("compile", np.zeros(len(steps), np.int64))
    in_windows = int((rest - compiling)[ours].sum()) + _time_between(steps, ours)
    ledger.add("windows", in_windows)
    compiling_ns = int(compiling[warm & (place > 0)].sum())
    warming_ns = int(rest[warm & plain].sum()) + int(compiling[warm & ours].sum())
    ledger.add_compiling("first_steps", warming_ns, compiling_ns)
    training = {
        phase: int(steps.phases_ns[phase][steady].sum())
        for phase in TRAINING_PHASES
        if phase in steps.phases_ns
    }
    unphased = int(rest[steady].sum()) - sum(training.values())
    if steps.unnoted_ns is not None:
        training, unphased = _in_proportion(training, unphased), 0
    if "compile" in training:
        training["compile"] += int(compiling[ours & ~warm].sum())
    ledger.divide("training", {**training, "other": training.get("other", 0) + unphased})


def _in_proportion(parts: dict[str, int], more: int) -> dict[str, int]:
    """Of long steps that were not noted, what goes beyond a usual step belongs to no phase."""
    total = sum(parts.values())
    if not total:
        return {"other": more}
    larger = {name: part + part * more // total for name, part in parts.items()}
    largest = max(larger, key=larger.__getitem__, default="other")
    larger[largest] = larger.get(largest, 0) + total + more - sum(larger.values())
    return larger


def find_noted(steps: StepColumns | None) -> NotedSteps | None:
    """None where all steps were noted in full, or too few to speak for the others."""
    if steps is None or steps.unnoted_ns is None:
        return None
    plain = steps.plain & steps.noted
    count, of = int(plain.sum()), int(steps.plain.sum())
    if count < _FEWEST_NOTED:
        return None
    walls = steps.wall_ns[plain].astype(np.float64)
    phases = {}
    for name in USUAL_PHASES:
        if name in steps.phases_ns:
            column = steps.phases_ns[name][plain]
            share = float(column.sum() / walls.sum())
            error = float(np.std(column - share * walls, ddof=1)) / float(walls.mean())
            half = NORMAL_95 * error * math.sqrt((1 - count / of) / count)
            phases[name] = (share, max(0.0, share - half), min(1.0, share + half))
    return NotedSteps(steps=of, noted=count, noting_ms=steps.ours_ns / 1e6, phases=phases)


def noted_words(noted: NotedSteps) -> str:
    """Where an account of phases comes from."""
    largest = max(noted.phases.items(), key=lambda item: item[1][0], default=None)
    phase = ""
    if largest is not None:
        _, low, high = largest[1]
        phase = f" ({largest[0]}: {figures.percent(low)} to {figures.percent(high)})"
    return (
        f"steps are short, so the phases of {noted.noted:,} of {noted.steps:,} were noted and stand"
        f" for all{phase}"
    )


def _time_between(steps: StepColumns, ours: Bools) -> int:
    """Between two steps, next to one of ours: opening and saving a window."""
    starts = steps.end_unix_ns - steps.wall_ns
    gaps = np.maximum(starts[1:] - steps.end_unix_ns[:-1], 0)
    return int(gaps[ours[1:] | ours[:-1]].sum())


def _add_shut_down(ledger: _Ledger, last_end_ns: int, times: RunTimes) -> None:
    """What follows the last step; evaluation and checkpoints there count as such."""
    left = max(0, times.ended_ns - last_end_ns)
    for name in _OWN_PARTS:
        after = min(left, times.after_last_ns.get(name, 0))
        ledger.add(name, after)
        left -= after
    ledger.add("shut_down", left)


def _close(ledger: _Ledger, wall: int, notes: list[str]) -> RunAccount:
    sums = ledger.sums
    if not ledger.inner.get("first_steps", {}).get("compile"):
        ledger.inner.pop("first_steps", None)  # nothing was compiled
    sums["outside"] += wall - sum(sums.values())
    if sums["outside"] < 0:
        if sums["outside"] < -_CLOCKS_APART * wall:
            notes.append("steps claim more than the wall time: a clock was set during the run")
        # Steps that claim more than the wall time are cut, the largest part first.
        debt, sums["outside"] = -sums["outside"], 0
        for name in sorted(sums, key=lambda part: -sums[part]):
            taken = min(debt, sums[name])
            sums[name] -= taken
            debt -= taken
    return RunAccount(
        wall_ms=wall / 1e6,
        goodput=sums["training"] / wall if wall else 0.0,
        parts=tuple(_part(name, sums[name], wall, ledger.inner.get(name)) for name in ACCOUNT),
        notes=tuple(notes),
    )


def _part(name: str, ns: int, wall: int, inner: dict[str, int] | None = None) -> AccountPart:
    parts = _scaled(inner, ns) if inner else {}
    return AccountPart(
        id=name,
        ms=ns / 1e6,
        share=ns / wall if wall else 0.0,
        parts=tuple(_part(key, value, wall) for key, value in parts.items()),
    )


def _scaled(parts: dict[str, int], ns: int) -> dict[str, int]:
    """So that they add up to `ns`: the part may have been cut. The largest gets the rounding."""
    whole = sum(parts.values())
    if whole == ns or not whole:
        return parts
    scaled = {name: value * ns // whole for name, value in parts.items()}
    scaled[max(scaled, key=lambda name: scaled[name])] += ns - sum(scaled.values())
    return scaled


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_parts(lists: Sequence[Sequence[AccountPart]]) -> tuple[AccountPart, ...]:
    names = dict.fromkeys(part.id for parts in lists for part in parts)
    out = []
    for name in names:
        same = [next((part for part in parts if part.id == name), None) for parts in lists]
        out.append(
            AccountPart(
                id=name,
                ms=_mean([part.ms if part else 0.0 for part in same]),
                share=_mean([part.share if part else 0.0 for part in same]),
                parts=_mean_parts([part.parts if part else () for part in same]),
            )
        )
    return tuple(out)


# The runs of all ranks in one: every rank counts, and few are listed.

MOST_LISTED = 64  # runs without a trace; beyond, only the spread and the account show them
_SLOWEST, _LONGER = 8, 0.01  # ranks that are named; by how much of the median they are longer


def join_all_ranks(
    traced: Sequence[RankRun],
    untraced: Sequence[RankWithoutTrace],
    others: Sequence[RankRun],
    job: Job | None = None,
) -> WholeRun | None:
    """`others` are earlier attempts, and processes outside the job; `job` has the hosts' clocks."""
    # None for bare traces. A rank's account is the sum of its attempts'; the job's is the
    # mean. `job` has the hosts' clocks: it lasts from the first host's start to the last
    # one's end.
    runs = [*traced, *(rank.run for rank in untraced), *others]
    if not runs:
        whole = None
    else:
        ordered = widen_to_job(sorted(runs, key=lambda run: (run.attempt, run.rank)), job)
        by_rank: dict[int, list[RunAccount]] = {}
        for run in ordered:
            if run.account is not None:
                by_rank.setdefault(run.rank, []).append(run.account)
        accounts = [add_accounts(accounts) for accounts in by_rank.values()]
        whole = WholeRun(ranks=tuple(ordered), account=mean_account(accounts))
    if whole is None:
        return None
    ranks = whole.ranks
    if len(untraced) + len(others) > MOST_LISTED:
        listed = {run.rank for run in traced}
        ranks = tuple(run for run in ranks if run.rank in listed)
    return replace(whole, ranks=ranks, spread=measure_spread(traced, untraced))


def measure_spread(
    traced: Sequence[RankRun], untraced: Sequence[RankWithoutTrace]
) -> RankSpread | None:
    """None for one rank."""
    steps = [run.steps for run in (*traced, *(rank.run for rank in untraced))]
    if len(steps) < 2:
        return None
    timed = [(run.times.mean_ms, run.rank) for run in traced if run.times is not None]
    timed += [(rank.mean_ms, rank.rank) for rank in untraced if rank.mean_ms is not None]
    means = [mean for mean, _ in timed]
    middle = median(means) if means else None
    longer = [(mean, rank) for mean, rank in timed if mean > (1 + _LONGER) * (middle or 0.0)]
    slowest = sorted(longer, key=lambda pair: (-pair[0], pair[1]))[:_SLOWEST]
    return RankSpread(
        ranks=len(steps),
        fewest_steps=min(steps),
        most_steps=max(steps),
        least_mean_ms=min(means, default=None),
        median_mean_ms=middle,
        most_mean_ms=max(means, default=None),
        slowest=tuple(rank for _, rank in slowest),
    )


# A job that was restarted into the same run folder: attempts, one after another.
#
# The last attempt with a trace is explained. The steps of earlier ones, and of processes that left
# no trace, belong to the run and to its account all the same.


def note_attempts(runs: Sequence[RankRun]) -> list[Note]:
    """That the job was restarted, and how far each attempt came."""
    attempts = sorted({run.attempt for run in runs})
    if len(attempts) < 2:
        return []
    sizes = Counter(run.attempt for run in runs)
    named = {
        attempt: f"attempt {attempt}"
        + (f" ({counted(sizes[attempt], 'rank')})" if len(set(sizes.values())) > 1 else "")
        for attempt in attempts
    }
    steps = {
        attempt: max(run.steps for run in runs if run.attempt == attempt) for attempt in attempts
    }
    *earlier, last = attempts
    ended = ", ".join(f"{named[one]} ended after {counted(steps[one], 'step')}" for one in earlier)
    detail = f"the job was restarted: {ended}; {named[last]} is explained"
    return [Note(id="restarted", detail=detail)]


# The wall time of a job on several hosts: from the first host's start to the last one's end.
#
# Each rank's account covers the command on its own host, by its own clock. On one clock, what other
# hosts did before is start-up, and what they did afterwards is shut-down.

_NOT_ALIGNED = (
    "the hosts' clocks are not aligned: the wall time of each host is that of its own command only"
)


def widen_to_job(runs: Sequence[RankRun], job: Job | None) -> list[RankRun]:
    """`runs` are sorted by attempt: a rank's first begins with the job, its last ends with it."""
    first: dict[int, RankRun] = {}
    last: dict[int, RankRun] = {}
    for run in runs:
        if run.account is not None and run.began_ns is not None and run.ended_ns is not None:
            first.setdefault(run.rank, run)
            last[run.rank] = run
    began = _on_one_clock({rank: run.began_ns or 0 for rank, run in first.items()}, job)
    ended = _on_one_clock({rank: run.ended_ns or 0 for rank, run in last.items()}, job)
    if began is None or ended is None:
        return [_with_note(run) for run in runs]
    widened = []
    for run in runs:
        before = began[run.began_ns or 0] - min(began.values()) if first.get(run.rank) is run else 0
        after = max(ended.values()) - ended[run.ended_ns or 0] if last.get(run.rank) is run else 0
        account = widen_account(run.account, before, after) if run.account else None
        widened.append(replace(run, account=account))
    return widened


def _on_one_clock(by_rank: dict[int, int], job: Job | None) -> dict[int, int] | None:
    """The distinct times, each on the reference's clock; None if that cannot be known.

    Ranks of one host share a time, and must keep sharing it: one rank's offset counts for all.
    """
    if job is None or len(set(job.hosts.values())) < 2:
        return {unix_ns: unix_ns for unix_ns in by_rank.values()}
    if not job.clock.aligned and len(set(by_rank.values())) > 1:
        return None
    shifted: dict[int, int] = {}
    for rank in sorted(by_rank, key=lambda rank: (rank not in job.clock.offset_ns, rank)):
        unix_ns = by_rank[rank]
        moved = job.clock.shift_ns(rank, np.array([unix_ns], np.int64))
        shifted.setdefault(unix_ns, int(moved[0]))
    return shifted


def _with_note(run: RankRun) -> RankRun:
    if run.account is None:
        return run
    return replace(run, account=replace(run.account, notes=(*run.account.notes, _NOT_ALIGNED)))
