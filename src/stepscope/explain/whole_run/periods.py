"""Whether stalls come at a fixed distance: every 4th step, every 50th.

Stalls that follow each other directly are one burst, and count from where it begins. The distance
may be one step off now and then. Two causes with periods of their own, such as an evaluation every
50 steps and a checkpoint every 80, show as two combs of steps; the one with more stalls comes
first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Flags = NDArray[np.bool_]

_FEWEST = 4  # stalls
_OFTEN = 0.7  # of the distances are the period, or a multiple of it
_FILLED = 0.8  # of a comb's steps stalled
_HALF_FILLED = 0.6  # else "every 2nd step" would promise twice as many stalls as there are
_NEARLY_ALL = 0.95  # of the stalls that fit one period: several explain them as well
_JITTER_FROM = 8  # steps: shorter periods must be exact
_BY_CHANCE = 1e-4
_MOST_CANDIDATES = 6
_MOST_PERIODS = 3


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """Stalls come every `steps` steps; `share` of all stalls fit."""

    steps: int
    share: float


def find_period(numbers: Ints) -> Period | None:
    """The period of most stalls, if it and other periods explain most of them. `numbers` are the
    stalled steps', in order."""
    periods = find_periods(numbers)
    return periods[0] if sum(period.share for period in periods) >= _OFTEN else None


def find_periods(numbers: Ints) -> tuple[Period, ...]:
    """One for the distances of stalls as they follow each other, else one for each comb."""
    starts = _burst_starts(numbers)
    if len(starts) < _FEWEST:
        return ()
    single = _from_distances(starts)
    if single is not None and _is_filled(starts, single.steps, _FILLED):
        return (single,)
    combs = _from_combs(starts)
    if single is not None and _is_filled(starts, single.steps, _HALF_FILLED):
        better = sum(comb.share for comb in combs) >= _NEARLY_ALL * single.share
        return combs if better else (single,)
    return combs


def _burst_starts(numbers: Ints) -> Ints:
    if not len(numbers):
        return numbers
    starts: Ints = numbers[np.concatenate(([True], np.diff(numbers) > 1))]
    return starts


def _from_distances(starts: Ints) -> Period | None:
    """The commonest distance, where most distances are it or a multiple: a stall may be missing,
    as the profiler ran or as it was short."""
    gaps = np.diff(starts)
    steps = _commonest(gaps)
    times = np.maximum(np.rint(gaps / steps), 1)
    fits = np.abs(gaps - times * steps) <= _jitter(steps)
    direct = fits & (times == 1)
    share = float(fits.mean())
    if share < _OFTEN or direct.mean() < _OFTEN / 2 or _by_chance(gaps, direct, steps):
        return None
    exact = int(np.rint(gaps[direct].mean()))
    return Period(steps=exact, share=share)


def _by_chance(gaps: Ints, direct: Flags, steps: int) -> bool:
    """Whether stalls at random places would have so many equal distances: more than a binomial's
    tail allows, with the probability of that distance at this rate of stalls."""
    rate = min(0.5, 1 / float(gaps.mean()))
    probability = min(0.9, (2 * _jitter(steps) + 1) * rate * (1 - rate) ** (steps - 1 - 1))
    share = float(direct.mean())
    if share <= probability:
        return True
    if share >= 1.0:
        return len(gaps) * math.log(probability) > math.log(_BY_CHANCE)
    # Chernoff's bound of the tail.
    distance = share * math.log(share / probability) + (1 - share) * math.log(
        (1 - share) / (1 - probability)
    )
    return len(gaps) * distance < -math.log(_BY_CHANCE)


def _from_combs(starts: Ints) -> tuple[Period, ...]:
    """Take away the comb that holds most stalls, then look at the rest."""
    periods: list[Period] = []
    rest = starts
    while len(rest) >= _FEWEST and len(periods) < _MOST_PERIODS:
        combs = [(_on_comb(rest, steps), steps) for steps in _candidates(rest)]
        combs = [(comb, steps) for comb, steps in combs if comb.any()]
        if not combs:
            break
        comb, steps = max(combs, key=lambda pair: int(pair[0].sum()))
        periods.append(Period(steps=steps, share=int(comb.sum()) / len(starts)))
        rest = rest[~comb]
    return tuple(periods)


def _candidates(starts: Ints) -> list[int]:
    """The commonest distances between stalls with at most three others between them."""
    reach = min(4, len(starts) - 1)
    gaps = np.concatenate([starts[lag:] - starts[:-lag] for lag in range(1, reach + 1)])
    distances, counts = np.unique(gaps, return_counts=True)
    return [int(distances[i]) for i in np.argsort(-counts, kind="stable")[:_MOST_CANDIDATES]]


def _on_comb(starts: Ints, steps: int) -> Flags:
    """The stalls on the fullest comb of this period; none where too few of its steps stalled."""
    jitter = _jitter(steps)
    phases = starts % steps
    counts = np.bincount(phases, minlength=steps)
    near = sum((np.roll(counts, shift) for shift in range(-jitter, jitter + 1)), np.zeros(steps))
    phase = int(np.argmax(near))
    off = (phases - phase + steps // 2) % steps - steps // 2
    comb: Flags = np.abs(off) <= jitter
    slots = (int(starts[comb][-1]) - int(starts[comb][0])) / steps + 1
    crowded = (2 * jitter + 1) * len(starts) / max(1, int(starts[-1] - starts[0]))
    full = comb.sum() >= max(_FEWEST, _FILLED * slots) and crowded < 0.5 * _FILLED
    return comb if full else np.zeros(len(starts), np.bool_)


def _is_filled(starts: Ints, steps: int, least: float) -> bool:
    """Whether so many of the steps at this distance stalled. Where not nearly all did, two periods
    may have it in common: 50 and 75 are multiples of 25."""
    return len(starts) >= least * ((int(starts[-1]) - int(starts[0])) / steps + 1)


def _commonest(gaps: Ints) -> int:
    """The distance that most others equal, or miss by one step; of several, the exact one."""
    distances, counts = np.unique(gaps, return_counts=True)
    commonest = int(distances[np.argmax(counts)])
    if not _jitter(commonest):
        return commonest
    around = [
        (int(counts[np.abs(distances - middle) <= 1].sum()), int(counts[place]), int(middle))
        for place, middle in enumerate(distances.tolist())
        if abs(middle - commonest) <= 1
    ]
    return max(around)[2]


def _jitter(steps: int) -> int:
    return 1 if steps >= _JITTER_FROM else 0
