"""Decide whether a remedy makes the step shorter, from short trials: one start of the
command each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from stepscope.text.figures import percent
from stepscope.verify.spread import student_quantile
from stepscope.verify.steady import FEWEST_STEPS, without_pauses

# Two starts of one command differ by more than their steps explain, so a trial gives one number,
# the logarithm of its mean step, and starts are the sample. A tune goes like this:
#
# 1. Screening: every candidate runs once between runs of the base. `screen` says which are
# promising.
#    These trials never count as proof: the best of many is partly luck.
# 2. Confirmation: promising candidates in order, best first. Base and candidate run in pairs, next
# to
#    each other, the order changing from pair to pair (verify.runs.plan_pairs), always with fresh
#    runs. After every pair `judge` says "kept", "not kept" or "more runs".
# 3. What is kept joins the base; the next candidate has to beat the new base.
#
# What is many times faster than starts differ by needs no pairs: `settle` keeps it by the runs that
# there are. It has its own part of the 5%, divided among all configurations before any of them ran,
# so that the best of many is no luck.
#
# A candidate is kept if its estimated gain is at least WORTH and the gain is surely more than half
# of that. "Surely" is a one-sided Student interval around the mean of the pairs' differences. Its
# deviation comes from all repeated configurations (`start_noise`). Its level is chosen so that
# a tune in which nothing helps keeps something in at most 5 of 100 cases: `level_of_next_test`
# divides these 5% among the tests of the tune, and `judge` divides a test's level among the looks
# after each pair. docs/records/tune.md has the reasons; benchmarks/tune_noise.py tests them.

WORTH = 0.02  # of the base's step: a smaller gain is not worth a change
SURELY = WORTH / 2  # the gain must surely be larger than this
FALSE_KEEPS = 0.05  # of tunes in which nothing helps, the share that may keep something
SETTLED = 0.1  # of FALSE_KEEPS: what single runs may settle
MUCH = 1 / 3  # of the base's step: no smaller gain is settled by single runs
FEWEST_PAIRS, MOST_PAIRS = 2, 6  # a candidate is judged after each pair from the second on
PAIRED = FALSE_KEEPS * (1 - SETTLED)
_SHOWN = 0.975  # the shown interval holds 95%
_HOPELESS = 0.95  # an upper limit at this level below WORTH ends the test
_OPTIMISTIC = 0.8

Decision = Literal["kept", "not kept", "more runs"]


class TimedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the command: what was applied, when, and its steady steps (`steady_steps`)."""

    remedies: tuple[str, ...]
    number: int  # of the trial in the tune: order of time
    steps_ms: tuple[float, ...]


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """The share of the base's step that a candidate saves; negative if it is slower."""

    value: float
    low: float  # with `high` the 95% interval
    high: float


class Screening(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a candidate says."""

    gain: Gain
    promising: bool  # worth being confirmed with fresh pairs


class GainVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the pairs of a candidate say so far."""

    decision: Decision
    gain: Gain | None  # None before the first pair
    pairs: int
    more: int  # pairs that would probably be enough; 0 once decided
    why: str
    starts_differ: float | None = None  # by so much of a step, if that is why it is not kept


def other_way_round(gain: Gain) -> Gain:
    """Return what the base saves against the candidate."""

    def turned(share: float) -> float:
        return -share / (1 - share)

    return Gain(value=turned(gain.value), low=turned(gain.high), high=turned(gain.low))


def mean_ms(trial: TimedTrial) -> float:
    """The mean steady step without pauses of the machine."""
    return float(without_pauses(trial.steps_ms).mean())


def screen(
    candidate: TimedTrial, base: Sequence[TimedTrial], trials: Sequence[TimedTrial]
) -> Screening:
    """Compare one run with the base's runs nearest in time: the last before and the first after.

    `base` are all runs of the base, `trials` all runs so far. Only a candidate that is more than a
    deviation short of WORTH is not promising. Confirm the promising ones in the order of their
    gain.
    """
    before = [trial for trial in base if trial.number < candidate.number]
    after = [trial for trial in base if trial.number > candidate.number]
    around = [
        *([max(before, key=lambda trial: trial.number)] if before else []),
        *([min(after, key=lambda trial: trial.number)] if after else []),
    ]
    noise = start_noise(_repeated(trials))
    saved = float(np.mean([_log(trial) for trial in around])) - _log(candidate)
    deviation = noise.deviation * math.sqrt(1 + 1 / len(around))
    reach = student_quantile(max(1.0, noise.freedom), _SHOWN) * deviation
    return Screening(gain=_gain(saved, reach), promising=_share(saved + deviation) >= WORTH)


def settle(
    candidate: Sequence[TimedTrial],
    base: Sequence[TimedTrial],
    trials: Sequence[TimedTrial],
    *,
    number: int,
    expected: int,
) -> GainVerdict | None:
    """Keep a candidate whose gain is many times what starts differ by; None: pairs must decide.

    `number` is the configuration's place, from 0, in the order in which they first ran, and
    `expected` how many there were likely to be before the first one ran.
    """
    few = min((len(trial.steps_ms) for trial in (*candidate, *base)), default=0)
    if not candidate or len(base) < _FEWEST_BASES or few < FEWEST_STEPS:
        return None
    noise = start_noise(_repeated(trials))
    freedom = noise.freedom + _BEFORE.freedom
    squares = noise.freedom * noise.deviation**2 + _BEFORE.freedom * _BEFORE.variance
    deviation = math.sqrt(squares / freedom * (1 / len(candidate) + 1 / len(base)))
    saved = float(np.mean(list(map(_log, base))) - np.mean(list(map(_log, candidate))))
    level = FALSE_KEEPS * SETTLED * _share_of_test(number, max(1, expected))
    if _share(saved - student_quantile(freedom, 1 - level) * deviation) < SURELY:
        return None
    gain = _gain(saved, student_quantile(freedom, _SHOWN) * deviation)
    if gain.value < MUCH:
        return None
    why = f"saves {percent(gain.value)} of the step, many times what starts differ by"
    return GainVerdict(decision="kept", gain=gain, pairs=0, more=0, why=why)


def level_of_next_test(outcomes: Sequence[bool], expected: int) -> float:
    """The level of the next test of this tune, from what became of the tests before it.

    `outcomes` says for each candidate that was confirmed so far, in order, whether it was kept.
    `expected` is how many tests the tune was likely to make when confirmation began, and must not
    change during a tune: half of FALSE_KEEPS is divided evenly among so many tests, the other half
    among all later ones, ever less. What a kept candidate had passes on to the next test (the
    fallback procedure): a tune that keeps what it tests does not become stricter.
    """
    level = 0.0
    for number, kept in enumerate([*outcomes, False]):
        level += PAIRED * _share_of_test(number, max(1, expected))
        if number < len(outcomes) and not kept:
            level = 0.0
    return level


def judge(
    pairs: Sequence[tuple[TimedTrial, TimedTrial]], trials: Sequence[TimedTrial], level: float
) -> GainVerdict:
    """Decide on a candidate from its fresh pairs (base, candidate), asked again after each pair.

    `trials` are all runs of the tune so far, these pairs included: they tell how much starts
    differ. `level` comes from `level_of_next_test`, once for each candidate. "more runs" is only
    answered if another pair can still change the answer, so a loop that runs a pair while it is
    answered ends.
    """
    if not pairs:
        more = FEWEST_PAIRS
        return GainVerdict(decision="more runs", gain=None, pairs=0, more=more, why="no pair yet")
    few = min(len(trial.steps_ms) for pair in pairs for trial in pair)
    if few < FEWEST_STEPS:
        why = f"a trial has {few} steady steps, but {FEWEST_STEPS} are needed"
        return GainVerdict(decision="not kept", gain=None, pairs=len(pairs), more=0, why=why)
    own = {trial.remedies for pair in pairs for trial in pair}
    return _Test(pairs, start_noise(_repeated(trials), own), level).verdict()


class _Test:
    """One candidate's pairs. Savings are logarithms of base over candidate inside."""

    def __init__(
        self, pairs: Sequence[tuple[TimedTrial, TimedTrial]], noise: StartNoise, level: float
    ) -> None:
        self.savings = np.array([_log(base) - _log(candidate) for base, candidate in pairs])
        self.pairs = len(pairs)
        self.saved = float(self.savings.mean())
        # The trials of other candidates may be quieter than these.
        own = float(self.savings.std(ddof=1)) if self.pairs > 1 else 0.0
        self.deviation = max(math.sqrt(2) * noise.deviation, own)  # of one pair
        self.freedom = max(1.0, noise.freedom)
        self.look_level = level / (MOST_PAIRS - FEWEST_PAIRS + 1)

    def verdict(self) -> GainVerdict:
        gain = self.gain()
        if self.is_sure(self.pairs, self.saved) and gain.value >= WORTH:
            return self.ends("kept", f"saves {percent(gain.value)} of the step")
        if _share(self.saved + self.reach(self.pairs, _HOPELESS)) < WORTH:
            if gain.high < 0:
                return self.ends("not kept", f"{percent(-gain.value)} slower")
            return self.ends("not kept", f"gains less than {percent(WORTH)}")
        if self.pairs >= MOST_PAIRS:
            if gain.value < WORTH:
                why = f"gains {percent(gain.value)}, less than {percent(WORTH)}"
                return self.ends("not kept", why)
            return self.unsure()
        more = self.enough(self.saved)
        if more is None:  # not even a gain at the upper end of what is likely would be shown
            if self.enough(self.saved + self.reach(self.pairs, _OPTIMISTIC)) is None:
                return self.unsure()
            more = MOST_PAIRS - self.pairs
        why = f"{self.pairs} pair{'s' * (self.pairs > 1)} so far: not certain yet"
        return GainVerdict(decision="more runs", gain=gain, pairs=self.pairs, more=more, why=why)

    def ends(self, decision: Decision, why: str) -> GainVerdict:
        return GainVerdict(decision=decision, gain=self.gain(), pairs=self.pairs, more=0, why=why)

    def unsure(self) -> GainVerdict:
        starts = self.deviation / math.sqrt(2)
        same = f"starts of the same command differ by {percent(starts)}"
        verdict = self.ends("not kept", f"not certain: {same}, as much as it may gain")
        return msgspec.structs.replace(verdict, starts_differ=starts)

    def gain(self) -> Gain:
        return _gain(self.saved, self.reach(self.pairs, _SHOWN))

    def is_sure(self, pairs: int, saved: float) -> bool:
        if pairs < FEWEST_PAIRS:
            return False
        return _share(saved - self.reach(pairs, 1 - self.look_level)) > SURELY

    def enough(self, saved: float) -> int | None:
        """So many more pairs make it sure if it saves so much; None: MOST_PAIRS would not."""
        if _share(saved) < WORTH:
            return None
        later = range(max(self.pairs + 1, FEWEST_PAIRS), MOST_PAIRS + 1)
        return next((n - self.pairs for n in later if self.is_sure(n, saved)), None)

    def reach(self, pairs: int, level: float) -> float:
        # Each further pair repeats two configurations once more.
        freedom = self.freedom + 4 / 3 * (pairs - self.pairs)
        return student_quantile(freedom, level) * self.deviation / math.sqrt(pairs)


def _share_of_test(number: int, expected: int) -> float:
    """Return a test's share of FALSE_KEEPS; `number` counts from 0, and all add up to 1."""
    if number < expected:
        return 0.5 / expected
    later = number - expected + 1
    return 0.5 / (later * (later + 1))


def _repeated(trials: Sequence[TimedTrial]) -> dict[tuple[str, ...], list[float]]:
    """Logarithms of the steps of what ran at least twice, by configuration, in order of time."""
    logs: dict[tuple[str, ...], list[float]] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        if len(trial.steps_ms) >= FEWEST_STEPS:
            logs.setdefault(trial.remedies, []).append(_log(trial))
    return {remedies: values for remedies, values in logs.items() if len(values) > 1}


@lru_cache(maxsize=4096)  # asked for again after every pair
def _log(trial: TimedTrial) -> float:
    return math.log(mean_ms(trial))


def _gain(saved: float, reach: float) -> Gain:
    return Gain(value=_share(saved), low=_share(saved - reach), high=_share(saved + reach))


def _share(saved: float) -> float:
    """Return the share of the base's step from the logarithm of base over candidate."""
    return -math.expm1(-saved)


# How much two starts of one command differ.
#
# Every configuration that ran more than once says something about it, but a few runs each say
# little, and configurations are not alike: a step that the host paces differs by more from start to
# start than one that a GPU paces. So a test's own configurations count by their runs, and all
# others together by as many runs as their likeness deserves (the moderated variance of Smyth,
# "Linear models and empirical Bayes methods", 2004): where all scatter alike everything is pooled,
# where they do not each stands for itself.

_LEAST = 0.003  # standard deviation of one start: never believed to be smaller
_FIRST_GUESS = 0.03  # of one start, before anything has run twice
# What is assumed besides what was seen, where single runs are to settle something: starts of the
# scripts that were tuned so far differ by 0.2 to 7%.
_BEFORE_DEVIATION, _BEFORE_FREEDOM = 0.05, 3.0
_FEWEST_BASES = 2
_FEWEST = 3  # configurations that can show how unlike they are
_MOST_FREEDOM = 1e3
_STEP = 1e-2  # of numerical derivatives


class StartNoise(msgspec.Struct, frozen=True, kw_only=True):
    """One start's deviation, as a share of the step."""

    deviation: float
    freedom: float  # degrees of freedom; 0: nothing ran twice, and the deviation is a guess


class _Scatter(NamedTuple):
    """A variance and its degrees of freedom."""

    variance: float
    freedom: float


_BEFORE = _Scatter(_BEFORE_DEVIATION**2, _BEFORE_FREEDOM)


def start_noise(
    logs: Mapping[tuple[str, ...], Sequence[float]],
    own: Collection[tuple[str, ...]] = (),
) -> StartNoise:
    """Average over `own` configurations, or of all; `logs` are repeated runs', in order."""
    by_name = {name: _scatter(values) for name, values in logs.items()}
    if not by_name:
        return StartNoise(deviation=_FIRST_GUESS, freedom=0.0)
    noise = pooled = _pooled(by_name.values())
    usual = _usual(by_name.values()) if own else None
    if usual is not None:
        known = [[by_name[name]] if name in by_name else [] for name in own]
        # Of independent estimates; the freedom is Satterthwaite's.
        scatters = [_pooled([usual, *scatters]) for scatters in known]
        total = sum(scatter.variance for scatter in scatters)
        freedom = total**2 / sum(scatter.variance**2 / scatter.freedom for scatter in scatters)
        noise = _Scatter(total / len(scatters), freedom)
    return StartNoise(
        deviation=max(_LEAST, math.sqrt(noise.variance)),
        freedom=min(noise.freedom, pooled.freedom),
    )


def _scatter(logs: Sequence[float]) -> _Scatter:
    """Compare only runs that follow each other, so that a slow drift of the machine counts little
    (von Neumann's estimate: half the mean square of successive differences)."""
    n = len(logs)
    variance = float((np.diff(logs) ** 2).mean()) / 2
    return _Scatter(max(variance, _LEAST**2), 2 * (n - 1) ** 2 / (3 * n - 4))


def _pooled(scatters: Collection[_Scatter]) -> _Scatter:
    freedom = sum(scatter.freedom for scatter in scatters)
    squares = sum(scatter.freedom * scatter.variance for scatter in scatters)
    return _Scatter(squares / freedom, freedom)


def _usual(scatters: Collection[_Scatter]) -> _Scatter | None:
    """What a configuration's scatter is like before it has run; None: all are alike."""
    if len(scatters) < _FEWEST:
        return None
    halves = np.array([scatter.freedom / 2 for scatter in scatters])
    levels = np.array(
        [
            math.log(scatter.variance) - _digamma(half) + math.log(half)
            for scatter, half in zip(scatters, halves, strict=True)
        ]
    )
    unlike = float(levels.var(ddof=1)) - float(np.mean([_trigamma(half) for half in halves]))
    if unlike <= _trigamma(_MOST_FREEDOM / 2):
        return None
    # By halving: trigamma falls.
    half, high = 1e-3, _MOST_FREEDOM
    while high / half > 1 + 1e-6:
        middle = math.sqrt(half * high)
        half, high = (middle, high) if _trigamma(middle) > unlike else (half, middle)
    return _Scatter(math.exp(float(levels.mean()) + _digamma(half) - math.log(half)), 2 * half)


def _digamma(x: float) -> float:
    return (math.lgamma(x + _STEP * x) - math.lgamma(x - _STEP * x)) / (2 * _STEP * x)


def _trigamma(x: float) -> float:
    step = _STEP * x
    return (math.lgamma(x + step) - 2 * math.lgamma(x) + math.lgamma(x - step)) / step**2
