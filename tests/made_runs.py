"""Runs that never ran: all steps of all ranks, with stalls of several causes and a change of level.

Costs, times and the account are computed from the very steps that are made, so they add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepscope.records.explanation import Place
from stepscope.records.run import (
    STALL_CAUSES,
    AccountPart,
    LevelChange,
    RankRun,
    RunAccount,
    Stall,
    StepSeries,
    StepTimes,
    WholeRun,
)

BEGAN_NS = 1_790_000_000_000_000_000
START_UP_NS = 42_000_000_000


@dataclass(frozen=True, kw_only=True)
class PlantedStall:
    """Every `period`-th step, or one in `one_in` at random; `ms` is what it takes longer."""

    cause: str
    ms: float
    period: int | None = None
    one_in: int | None = None
    where: tuple[Place, ...] = ()


PLANTED = (
    PlantedStall(
        cause="data", ms=30.0, period=4, where=(Place(file="/home/me/imagenet/data.py", line=88),)
    ),
    PlantedStall(
        cause="evaluation", ms=4_000.0, period=5_000, where=(Place(file="train.py", line=212),)
    ),
    PlantedStall(
        cause="checkpoint", ms=900.0, period=2_500, where=(Place(file="train.py", line=240),)
    ),
    PlantedStall(cause="gc", ms=120.0, one_in=900),
    PlantedStall(cause="compile", ms=2_500.0, one_in=20_000),
    PlantedStall(cause="operating_system", ms=45.0, one_in=400),
    PlantedStall(cause="logging", ms=18.0, period=50, where=(Place(file="train.py", line=131),)),
    PlantedStall(cause="unknown", ms=70.0, one_in=3_000),
)


def make_run(
    steps: int = 1_000,
    ranks: int = 2,
    *,
    planted: tuple[PlantedStall, ...] = PLANTED,
    slower_from: float = 0.6,  # share of the run, after which steps take longer
    factor: float = 1.35,
    windows: tuple[float, ...] = (0.1, 0.5),
    slow_rank: int | None = None,
    seed: int = 3,
) -> WholeRun:
    made = [
        _rank_run(rank, steps, planted, slower_from, factor, windows, slow_rank == rank, seed)
        for rank in range(ranks)
    ]
    return WholeRun(ranks=tuple(made), account=made[0].account)


def _rank_run(
    rank: int,
    steps: int,
    planted: tuple[PlantedStall, ...],
    slower_from: float,
    factor: float,
    windows: tuple[float, ...],
    slow: bool,
    seed: int,
) -> RankRun:
    rng = np.random.default_rng(seed)  # the same for all ranks: they stall together
    own = np.random.default_rng((seed, rank))
    place = np.arange(steps)
    level = np.where(place < steps * slower_from, 36.0, 36.0 * factor) * (1.06 if slow else 1.0)
    calm = level * np.exp(own.normal(0.0, 0.01, steps))
    warm_up = min(10, steps // 5)
    calm[:warm_up] *= np.linspace(4.0, 1.2, warm_up) if warm_up else 1.0
    window = np.zeros(steps, np.bool_)
    for share in windows:
        window[int(share * steps) : int(share * steps) + max(3, steps // 400)] = True
    calm[window] *= 1.4
    excess = np.zeros((len(STALL_CAUSES), steps))
    for stall in planted:
        size = stall.ms * np.exp(rng.normal(0.0, 0.25, steps)) * own.uniform(0.97, 1.03, steps)
        hit = place % stall.period == stall.period - 1 if stall.period else None
        if hit is None:
            hit = rng.random(steps) < 1 / (stall.one_in or steps)
        hit &= ~window & (place >= warm_up)
        excess[STALL_CAUSES.index(stall.cause)] += np.where(hit, size, 0.0)
    step_ms = calm + excess.sum(axis=0)
    cause = np.where(excess.any(axis=0), excess.argmax(axis=0), -1).astype(np.int8)
    step_ns = (step_ms * 1e6).astype(np.int64)
    start = BEGAN_NS + START_UP_NS + np.concatenate([[0], np.cumsum(step_ns[:-1])])
    series = StepSeries(
        number=place,
        start_unix_ns=start,
        step_ns=step_ns,
        cause=cause,
        window=window,
        warm_up=warm_up,
    )
    steady = ~window & (place >= warm_up)
    change = LevelChange(
        step=int(steps * slower_from),
        low=int(steps * slower_from * 0.995),
        high=int(steps * slower_from * 1.004),
        before_ms=36.0,
        after_ms=36.0 * factor,
    )
    return RankRun(
        rank=rank,
        steps=steps,
        warm_up=warm_up,
        times=_times(step_ms[steady], excess[:, steady]),
        stalls=_stalls(excess, steady, step_ms, planted),
        changes=(change,) if 0 < slower_from < 1 and factor != 1 else (),
        account=_account(step_ms, excess, window, warm_up),
        series=series,
    )


def _times(step_ms: np.ndarray, excess: np.ndarray) -> StepTimes:
    mean = float(step_ms.mean())
    error = 1.96 * float(step_ms.std()) / len(step_ms) ** 0.5
    return StepTimes(
        steps=len(step_ms),
        mean_ms=mean,
        low_ms=mean - error,
        high_ms=mean + error,
        median_ms=float(np.median(step_ms)),
        typical_ms=mean - float(excess.sum(axis=0).mean()),
        p99_ms=float(np.percentile(step_ms, 99)),
        longest_ms=float(step_ms.max()),
        variation=0.01,
    )


def _stalls(
    excess: np.ndarray, steady: np.ndarray, step_ms: np.ndarray, planted: tuple[PlantedStall, ...]
) -> tuple[Stall, ...]:
    mean = float(step_ms[steady].mean())
    stalls = []
    for plan in planted:
        own = excess[STALL_CAUSES.index(plan.cause)]
        hit = np.flatnonzero(own)
        if not len(hit):
            continue
        cost = float(own[steady].mean())
        longest = hit[np.argsort(-own[hit])][:5]
        stalls.append(
            Stall(
                cause=plan.cause,
                steps=len(hit),
                cost_ms=cost,
                share=cost / mean,
                typical_ms=float(np.median(own[hit])),
                longest_ms=float(own.max()),
                period=plan.period,
                numbers=tuple(longest.tolist()),
                where=plan.where,
            )
        )
    return tuple(sorted(stalls, key=lambda stall: -stall.cost_ms))


def _account(
    step_ms: np.ndarray, excess: np.ndarray, window: np.ndarray, warm_up: int
) -> RunAccount:
    rare = {name: excess[STALL_CAUSES.index(name)].sum() for name in ("evaluation", "checkpoint")}
    first = float(step_ms[:warm_up].sum())
    windows = float(step_ms[window].sum())
    training = float(step_ms.sum()) - first - windows - sum(rare.values())
    start = START_UP_NS / 1e6
    ms = {
        "start_up": start,
        "first_steps": first,
        "training": training,
        **rare,
        "windows": windows,
        "outside": 1_500.0,
        "shut_down": 800.0,
    }
    wall = sum(ms.values())
    inside = {
        "start_up": {"imports": 0.35 * start, "process_group": 0.15 * start, "build": 0.5 * start}
    }
    parts = [
        AccountPart(
            id=name,
            ms=value,
            share=value / wall,
            parts=tuple(
                AccountPart(id=part, ms=piece, share=piece / wall)
                for part, piece in inside.get(name, {}).items()
            ),
        )
        for name, value in ms.items()
    ]
    return RunAccount(wall_ms=wall, goodput=training / wall, parts=tuple(parts))
