"""The run's stalls over all ranks, and its account, as the page shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.records.words import counted
from stepscope.ui.run_words import phase_words
from stepscope.ui.words import ACCOUNT_PARTS, STALLS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.explanation import Place
    from stepscope.records.whole_run import AccountPart, RankRun, RunAccount, Stall, StallCause

MOST_ACCOUNTS = 16  # ranks whose wall time has a bar of its own
_DIFFERS = 0.05  # of the wall time: ranks that differ by less share one bar
_LEAST_SHARE = 0.0005  # of the wall time: a smaller part has no place in the bar


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountSlice:
    id: str
    label: str
    hint: str
    ms: float
    share: float
    parts: tuple[tuple[str, float], ...]  # label, ms


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountBar:
    label: str
    wall_ms: float
    goodput: float
    slices: tuple[AccountSlice, ...]


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
    parts = [part for part in account.parts if part.share >= _LEAST_SHARE]
    return AccountBar(
        label=label,
        wall_ms=account.wall_ms,
        goodput=account.goodput,
        slices=tuple(map(_account_slice, parts)),
    )


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
        return f"every {_ordinal(period)} step"
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
    return StallRow(
        cause=cause,
        label=label,
        hint=hint,
        often=how_often(stalled, steps, _common_period([stall for _, stall in pairs])),
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


def _common_period(stalls: Sequence[Stall]) -> int | None:
    periods = {stall.period for stall in stalls}
    return periods.pop() if len(periods) == 1 else None


def _which(ranks: Sequence[int], all_ranks: int) -> str:
    numbers = sorted(set(ranks))
    if len(numbers) == all_ranks:
        return "all" if all_ranks > 1 else ""
    if len(numbers) > 4:
        return f"{len(numbers):,} of {all_ranks:,}"
    return ", ".join(map(str, numbers))


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{'th' if 10 <= number % 100 <= 20 else ending}"


def _differ(accounts: Sequence[RunAccount]) -> bool:
    shares: dict[str, list[float]] = {}
    for account in accounts:
        for part in account.parts:
            shares.setdefault(part.id, []).append(part.share)
    return any(
        max(values) - (min(values) if len(values) == len(accounts) else 0.0) > _DIFFERS
        for values in shares.values()
    )


def _account_slice(part: AccountPart) -> AccountSlice:
    label, hint = ACCOUNT_PARTS.get(part.id, (phase_words(part.id).capitalize(), ""))
    inside = tuple((phase_words(piece.id), piece.ms) for piece in part.parts if piece.ms > 0)
    return AccountSlice(
        id=part.id, label=label, hint=hint, ms=part.ms, share=part.share, parts=inside
    )
