"""Write every step of every rank as a data block for the page, with the run's stalls over
all ranks and its account.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from stepscope.records.explanation import Place
from stepscope.records.job import Job
from stepscope.records.normal import median
from stepscope.records.run import (
    STALL_CAUSES,
    RankRun,
    RunAccount,
    StallCause,
    StepSeries,
)
from stepscope.text.words import counted, ordinal
from stepscope.ui.html.pane import encode_block, zigzag
from stepscope.ui.words import ACCOUNT_PARTS, STALLS, phase_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.ui.html.pane import Column

    Ints = NDArray[np.int64]
    Flags = NDArray[np.bool_]

# Times are in microseconds. Step numbers and starts are stored as what differs from "one more than
# the last" and "the last one's end", so they deflate to almost nothing. With too many steps for a
# page, the shortest and the longest step of each stretch stay: what is drawn keeps its extremes.

MOST_POINTS = 1_200_000  # of all ranks together; beyond, half as many: extremes deflate badly
MOST_BINS = 96  # of the distribution
_FEWEST_BINS = 12
_WIDEST_BIN = 0.06  # of its step time, if there are bins enough
_LEAST_SPREAD = 0.02  # of the step time: the axis is not narrower
_LEVEL = 3  # of deflating: noise takes sixty times as long at 9 and shrinks by 7% only
_FINEST_START = 20  # starts are exact to this part of a typical step


class RunPoints(NamedTuple):
    payload: str
    middle_us: dict[str, float]  # mean, median and p99 of all ranks' steady steps
    all_steps: int
    drawn: int


def encode_run(ranks: Sequence[RankRun], *, most: int = MOST_POINTS) -> RunPoints | None:
    """None where no rank has a step to draw."""
    drawn = drawable(ranks)
    if not drawn:
        return None
    all_series = [_series(rank) for rank in drawn]
    all_steps = sum(len(series.number) for series in all_series)
    share = all_steps if all_steps <= most else max(16, most // (2 * len(drawn)))
    kept = [thin(series, share) for series in all_series]
    heads = _in_turn([_head(rank, own) for rank, own in zip(drawn, kept, strict=True)])
    pool = [steady_us(series) for series in all_series]
    middle = _middle(np.concatenate(pool))
    if len(heads) == 1:
        middle = {name: heads[0][name] for name in middle}
    elif any(rank.times is not None for rank in drawn):
        middle["mean"] = 1e3 * mean_of(drawn, "mean_ms")  # the mean of the page's first sentence
    edges = _bin_edges(pool)
    unit_us = _start_unit(all_series)
    zero_ns, since_us = _since_first(all_series)
    columns: dict[str, Column] = {}
    for place, (series, since, own) in enumerate(zip(all_series, since_us, kept, strict=True)):
        columns |= _columns(place, series, since, own, unit_us)
    columns["bins"] = np.concatenate([_counts(series, edges) for series in all_series])
    head = {
        "zero_ms": zero_ns / 1e6,
        "unit_us": unit_us,
        "causes": [[cause, *STALLS[cause]] for cause in STALL_CAUSES],
        "series": heads,
        "all": middle,
        "bin_low_us": float(edges[0]),
        "bin_high_us": float(edges[-1]),
    }
    payload = encode_block(head, columns, level=_LEVEL)
    return RunPoints(payload, middle, all_steps, drawn=sum(map(len, kept)))


def on_one_clock(ranks: Sequence[RankRun], job: Job | None) -> list[RankRun]:
    """Steps of all hosts side by side, as far as their clocks were compared."""
    hosts = job.clock.hosts if job else ()
    ahead_ns = {rank: host.offset_ns or 0 for host in hosts for rank in host.ranks}
    moved = []
    for rank in ranks:
        if rank.series is not None and (ahead := ahead_ns.get(rank.rank, 0)):
            start = rank.series.start_unix_ns
            start = np.where(start > 0, start - ahead, start)
            rank = replace(rank, series=replace(rank.series, start_unix_ns=start))
        moved.append(rank)
    return moved


def thin(series: StepSeries, most: int) -> Ints:
    """Places of the steps to draw: all, or the shortest and longest of each stretch.

    The edges of windows and of the warm-up stay, so that bands begin and end where they did.
    """
    many = len(series.step_ns)
    if many <= most:
        return np.arange(many)
    stretch = math.ceil(2 * many / most)
    whole = math.ceil(many / stretch)
    padded = np.full(whole * stretch, series.step_ns[-1])
    padded[:many] = series.step_ns
    table = padded.reshape(whole, stretch)
    first = np.arange(whole) * stretch
    ends = np.flatnonzero(np.diff(series.window))
    warm = [0, min(series.warm_up, many - 1), many - 1]
    places = [first + table.argmin(axis=1), first + table.argmax(axis=1), ends, ends + 1, warm]
    return np.unique(np.minimum(np.concatenate(places), many - 1))


def is_steady(series: StepSeries) -> Flags:
    """Outside windows and warm-up; every step where that leaves none."""
    steady = ~series.window & (np.arange(len(series.number)) >= series.warm_up)
    return steady if steady.any() else np.ones(len(steady), np.bool_)


def steady_us(series: StepSeries) -> NDArray[np.float64]:
    return np.maximum(series.step_ns[is_steady(series)] / 1e3, 1.0)


def _series(rank: RankRun) -> StepSeries:
    assert rank.series is not None
    return rank.series


def _clock(series: StepSeries) -> Ints:
    """Starts that never run backwards. Where the clock was set back, or was not read, a step
    begins when the last one ended."""
    start = series.start_unix_ns
    passed = np.diff(start)
    lasted = series.step_ns[:-1]
    known = (start[:-1] > 0) & (start[1:] > 0) & (passed >= 0)
    return np.cumsum(np.concatenate([start[:1], np.where(known, passed, lasted)]))


def _since_first(all_series: Sequence[StepSeries]) -> tuple[int, list[Ints]]:
    """The first moment of the run, and each step's start after it in µs."""
    starts = [_clock(series) for series in all_series]
    zero_ns = min((int(start[0]) for start in starts if start[0] > 0), default=0)
    return zero_ns, [(start - (zero_ns if start[0] > 0 else 0)) // 1000 for start in starts]


def _start_unit(all_series: Sequence[StepSeries]) -> int:
    """A power of ten: a typical step is at least _FINEST_START of it."""
    typical_us = min(median(series.step_ns) for series in all_series) / 1e3
    return int(10 ** max(0, math.floor(math.log10(max(1.0, typical_us / _FINEST_START)))))


def _columns(
    place: int, series: StepSeries, since_us: Ints, kept: Ints, unit_us: int
) -> dict[str, Column]:
    step_us = (series.step_ns[kept] + 500) // 1000
    number = series.number[kept]
    start = np.maximum(since_us[kept], 0) // unit_us
    lasted = np.concatenate([[0], step_us[:-1] // unit_us])
    thinned = {f"{place}-calm": _calm_around(series, kept)} if len(kept) < len(since_us) else {}
    return {
        **thinned,
        f"{place}-number": zigzag(np.diff(number, prepend=-1) - 1),
        f"{place}-start": zigzag(np.diff(start, prepend=0) - lasted),
        f"{place}-step": np.maximum(step_us, 0),
        f"{place}-cause": (series.cause[kept] + 1).astype(np.uint8),
        f"{place}-window": series.window[kept].astype(np.uint8),
    }


def _calm_around(series: StepSeries, kept: Ints) -> Ints:
    """The mean of the steps without a stall from each drawn step to the next: of the shortest and
    longest of a stretch, the mean would be wrong."""
    calm = (series.cause < 0) & ~series.window
    many = np.add.reduceat(calm, kept, dtype=np.int64)
    sums = np.add.reduceat(np.where(calm, series.step_ns, 0), kept)
    mean = np.divide(sums, many, out=series.step_ns[kept].astype(np.float64), where=many > 0)
    return np.rint(mean / 1e3).astype(np.int64)


def _head(rank: RankRun, kept: Ints) -> dict[str, Any]:
    series = _series(rank)
    times = rank.times
    middle = _middle(steady_us(series))
    if times is not None:
        names = ("mean", "median", "p99")
        middle = {name: getattr(times, f"{name}_ms") * 1e3 for name in names}
    return {
        "rank": rank.rank,
        "attempt": rank.attempt,
        "steps": len(series.number),
        "drawn": len(kept),
        "warm_up": int(np.searchsorted(kept, series.warm_up)),
        "last": int(series.number[-1]),
        "changes": [
            [change.step, change.low, change.high, change.before_ms * 1e3, change.after_ms * 1e3]
            for change in rank.changes
        ],
        **middle,
    }


def _in_turn(heads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Attempts of a restarted job lie one after another: each is shifted by those before it."""
    longest: dict[int, int] = {}
    for head in heads:
        longest[head["attempt"]] = max(longest.get(head["attempt"], 0), head.pop("last") + 1)
    for head in heads:
        before = (steps for attempt, steps in longest.items() if attempt < head["attempt"])
        head["offset"] = sum(before)
    return heads


def _middle(step_us: NDArray[np.float64]) -> dict[str, float]:
    return {
        "mean": float(step_us.mean()),
        "median": median(step_us),
        "p99": float(np.percentile(step_us, 99)),
    }


def _bin_edges(pool: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Equal on a logarithmic axis, so that a stall of seconds leaves the typical steps room."""
    low = min(float(step_us.min()) for step_us in pool)
    high = max(float(step_us.max()) for step_us in pool)
    spread = max(math.log(high / low), _LEAST_SPREAD)
    wanted = max(3 * sum(map(len, pool)) ** (1 / 3), spread / _WIDEST_BIN)
    bins = min(MOST_BINS, max(_FEWEST_BINS, round(wanted)))
    return low * np.exp(np.linspace(-0.02, 1.02, bins + 1) * spread)


def _counts(series: StepSeries, edges: NDArray[np.float64]) -> Ints:
    """Steady steps by cause (none first) and bin."""
    many = len(edges) - 1
    steady = is_steady(series)
    bins = np.searchsorted(edges, steady_us(series), side="right") - 1
    cause = series.cause[steady].astype(np.int64) + 1
    return np.bincount(cause * many + bins, minlength=(len(STALL_CAUSES) + 1) * many)


# The run's stalls over all ranks, and its account, as the page shows them.

MOST_ACCOUNTS = 16  # ranks whose wall time has a bar of its own
_DIFFERS = 0.05  # of the wall time: ranks that differ by less share one bar
_LEAST_SHARE = 0.0005  # of the wall time: a smaller part has no place in the bar


class StallRow(NamedTuple):
    """One cause over all ranks that stalled for it."""

    cause: StallCause
    label: str
    hint: str
    often: str
    cost_ms: float  # per average step of all ranks
    share: float
    between_ms: float  # as well, but between epochs and so no part of a step
    longest_ms: float
    rank: int  # that has the longest one
    series: int  # its place among the ranks that are drawn
    step: int | None  # its number; None where it is not known or not drawn
    ranks: str
    where: tuple[Place, ...]


class AccountSlice(NamedTuple):
    id: str
    label: str
    hint: str
    ms: float
    share: float
    parts: list[tuple[str, float]]  # label, ms


class AccountBar(NamedTuple):
    label: str
    wall_ms: float
    goodput: float
    slices: list[AccountSlice]


def drawable(ranks: Sequence[RankRun]) -> list[RankRun]:
    """Those that have steps to draw, in the order of the page's series."""
    return [rank for rank in ranks if rank.series is not None and len(rank.series.number)]


def stall_rows(ranks: Sequence[RankRun]) -> list[StallRow]:
    """The costliest cause first. Ranks without steady steps have no stalls."""
    timed = [rank for rank in drawable(ranks) if rank.times is not None]
    causes = dict.fromkeys(stall.cause for rank in timed for stall in rank.stalls)
    places = {(rank.rank, rank.attempt): place for place, rank in enumerate(drawable(ranks))}
    rows = [_stall_row(cause, timed, places) for cause in causes]
    return sorted(rows, key=lambda row: (-row.cost_ms, -row.between_ms))


def account_bars(ranks: Sequence[RankRun]) -> list[AccountBar]:
    """One for each rank, if any part of their wall time differs much."""
    known = [(rank, rank.account) for rank in ranks if rank.account is not None]
    if len(known) < 2 or not _differ([account for _, account in known]):
        return []
    names = rank_names([rank for rank, _ in known])
    bars = zip(known[:MOST_ACCOUNTS], names, strict=False)
    return [account_bar(account, name) for (_, account), name in bars]


def account_bar(account: RunAccount, label: str) -> AccountBar:
    slices = []
    for part in account.parts:
        if part.share >= _LEAST_SHARE:
            name, hint = ACCOUNT_PARTS.get(part.id, (phase_words(part.id).capitalize(), ""))
            inside = [(phase_words(piece.id), piece.ms) for piece in part.parts if piece.ms > 0]
            slices.append(AccountSlice(part.id, name, hint, part.ms, part.share, inside))
    return AccountBar(label, account.wall_ms, account.goodput, slices)


def rank_names(ranks: Sequence[RankRun]) -> list[str]:
    """`rank 3`, or `rank 3, attempt 2` of a job that was restarted."""
    restarted = len({rank.attempt for rank in ranks}) > 1
    return [
        f"rank {rank.rank}" + (f", attempt {rank.attempt}" if restarted else "") for rank in ranks
    ]


def mean_of(ranks: Sequence[RankRun], name: str) -> float:
    """Over the steady steps of all ranks."""
    times = [rank.times for rank in ranks if rank.times is not None]
    steps = sum(time.steps for time in times)
    return float(sum(getattr(time, name) * time.steps for time in times)) / max(steps, 1)


def how_often(stalled: int, steps: int, period: int | None) -> str:
    """Every 50th step, 1 step in 4, or just a number where there are few."""
    if not stalled:
        return "between epochs"
    if period is not None and period > 1:
        return f"every {ordinal(period)} step"
    if stalled >= steps:
        return "every step"
    if stalled < 3:
        return counted(stalled, "step")
    return f"1 step in {round(steps / stalled):,}" if stalled * 1.5 < steps else "most steps"


def _stall_row(
    cause: StallCause, ranks: Sequence[RankRun], places: dict[tuple[int, int], int]
) -> StallRow:
    pairs = [(rank, stall) for rank in ranks for stall in rank.stalls if stall.cause == cause]
    rank, longest = max(pairs, key=lambda pair: pair[1].longest_ms)
    all_steps = sum(rank.times.steps for rank in ranks if rank.times)
    weighed = [(stall, rank.times.steps / all_steps) for rank, stall in pairs if rank.times]
    cost = sum(stall.cost_ms * weight for stall, weight in weighed)
    mean = mean_of(ranks, "mean_ms")
    stalled = sum(stall.steps for _, stall in pairs)
    steps = sum(rank.times.steps for rank, _ in pairs if rank.times)
    label, hint = STALLS[cause]
    periods = {stall.period for _, stall in pairs}
    return StallRow(
        cause=cause,
        label=label,
        hint=hint,
        often=how_often(stalled, steps, periods.pop() if len(periods) == 1 else None),
        cost_ms=cost,
        share=cost / mean if mean else 0.0,
        between_ms=sum(stall.between_epochs_ms * weight for stall, weight in weighed),
        longest_ms=longest.longest_ms,
        rank=rank.rank,
        series=places[rank.rank, rank.attempt],
        step=longest.numbers[0] if longest.numbers else None,
        ranks=_which([rank.rank for rank, _ in pairs], len({rank.rank for rank in ranks})),
        where=longest.where,
    )


def _which(ranks: Sequence[int], all_ranks: int) -> str:
    numbers = sorted(set(ranks))
    if len(numbers) == all_ranks:
        return "all" if all_ranks > 1 else ""
    if len(numbers) > 4:
        return f"{len(numbers):,} of {all_ranks:,}"
    return ", ".join(map(str, numbers))


def _differ(accounts: Sequence[RunAccount]) -> bool:
    shares: dict[str, list[float]] = {}
    for account in accounts:
        for part in account.parts:
            shares.setdefault(part.id, []).append(part.share)
    return any(
        max(values) - (min(values) if len(values) == len(accounts) else 0.0) > _DIFFERS
        for values in shares.values()
    )
