"""Which steps count, which of them took longer than a typical one, what they waited for, and
whether they come at a fixed distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.normal import median, quantile
from stepscope.records.rank import StepColumns
from stepscope.records.run import STALL_CAUSES, StallCause
from stepscope.step.arrays import Bools, Floats, Int64s
from stepscope.step.statistics import block_medians, spread

# A step's level is what a typical step takes there (step_levels.py). Pauses that were measured are
# taken off first: evaluation, checkpoints, compilation and garbage collection wherever they last
# longer than a tenth of the typical step; waits for data or other ranks where they also stand out
# from the noise (of the steps without them where a device may hide a wait, else of shorter waits).
# So steps that vary much, as on a shared machine, hide no pause. What is left of a step is a stall
# when it lies above its level by more than the noise of the other steps and by more than a tenth.
# That excess is divided among the other causes that measured waiting in that very step, the most
# specific ones first. What nobody measured is "unknown". So
#
#     mean step = typical step + the sum of all causes' cost per step
#
# holds to rounding.

LEAST_EXCESS = 0.10  # over the typical step
_STALL_DEVIATIONS = 5.0  # of the noise of steps that are no stalls
_ROUNDS = 3
_SHORT_WAITS = 0.25  # quantile: at least every fourth step waits no longer
_STRETCH = 8  # parts of a run; what waits last for most of one is a level, no stalls
_FEWEST_IN_STRETCH = 32
_MOST_STRETCHES, _MOST_IN_STRETCH = 1000, 500  # that are looked at in a long run
_MOST_WAIT = 0.75  # of all steps
# A cause further up in this list takes its share of a stall first.
_MOST_SPECIFIC_FIRST: tuple[StallCause, ...] = (
    "evaluation",
    "checkpoint",
    "compile",
    "gc",
    "data",
    "allocator",
    "collective",
    "operating_system",
    "logging",
)
_WAITS: tuple[StallCause, ...] = ("data", "collective")  # short ones are part of any step
_PAUSES: tuple[StallCause, ...] = ("evaluation", "checkpoint", "compile", "gc", *_WAITS)


class StallSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The mean step, divided into the typical step and stalls."""

    mean_ns: float
    typical_ns: float
    stalled: Bools
    excess_ns: dict[StallCause, Floats]  # of each step; a cause without any is not in it

    @property
    def main_cause(self) -> NDArray[np.int8]:
        """For each step the place in STALL_CAUSES of the cause that took most; -1: no stall."""
        place = np.full(len(self.stalled), -1, np.int8)
        largest = np.zeros(len(self.stalled))
        for cause, excess in self.excess_ns.items():
            more = excess > largest
            place[more] = STALL_CAUSES.index(cause)
            largest = np.maximum(largest, excess)
        return place


def split_stalls(
    step_ns: Floats, level: Floats, waits: Mapping[StallCause, Floats], *, hidden: bool = True
) -> StallSplit:
    """`level` is each step's typical time; `waits` holds what each cause measured in each step, by
    the host. With `hidden`, a device may have been busy meanwhile.

    Only waiting beyond a cause's own typical wait explains a stall: a loader that takes 2 ms at
    every step does not explain the one step that took 80.
    """
    pauses = _measured_pauses(step_ns, level, waits, hidden=hidden)
    rest = step_ns - sum(pauses.values(), np.zeros(len(step_ns)))
    is_long = find_stalled(rest, level)
    excess = np.where(is_long, rest - level, 0.0)
    beyond = {
        cause: _beyond_typical(wait, is_long) - pauses.get(cause, 0.0)
        for cause, wait in waits.items()
    }
    shares = _divide(excess, beyond)
    for cause, pause in pauses.items():
        shares[cause] = shares[cause] + pause
    total = sum(shares.values(), np.zeros(len(step_ns)))
    mean = float(step_ns.mean()) if len(step_ns) else 0.0
    per_step = float(total.mean()) if len(total) else 0.0
    return StallSplit(
        mean_ns=mean,
        typical_ns=mean - per_step,
        stalled=total > 0,
        excess_ns={cause: share for cause, share in shares.items() if share.any()},
    )


def without_waits(step_ns: Floats, waits: Mapping[StallCause, Floats]) -> Floats:
    """Steps without what they measurably waited for: their levels are those of typical steps,
    even where every other step waits. A wait may have been hidden behind a busy device, so no step
    becomes shorter than steps without waits are."""
    beyond = np.zeros(len(step_ns))
    for cause in _PAUSES:
        if cause in waits and len(step_ns):
            beyond += _beyond_short(waits[cause])
    waited = beyond > LEAST_EXCESS * (median(step_ns) if len(step_ns) else 0.0)
    if not waited.any() or waited.mean() > _MOST_WAIT:
        return step_ns
    calm = median(step_ns[~waited])
    return np.where(waited, np.maximum(step_ns - beyond, np.minimum(step_ns, calm)), step_ns)


def short_waits(wait: Floats) -> Floats:
    """What steps around each one wait when they wait for a short time: the longer of what the
    stretch before it and the stretch after it show. So a wait that grows, or that changes for good
    at some step, is part of the steps' level; a short spell of waits is not. Near the run's ends
    only one stretch is there, and shorter ones count too."""
    length = max(_FEWEST_IN_STRETCH, len(wait) // _STRETCH)
    if len(wait) < 2 * length:
        return np.full(len(wait), quantile(wait, _SHORT_WAITS))
    short = _short_on_either_side(wait, length)
    place = np.arange(len(wait))
    at_an_end = np.minimum(place, len(wait) - 1 - place) < length
    nearer = _short_on_either_side(wait, length // 4)
    return np.where(at_an_end, np.maximum(short, nearer), short)


def _short_on_either_side(wait: Floats, length: int) -> Floats:
    """Before each step and after it; the longer one."""
    apart = max(1, len(wait) // _MOST_STRETCHES)
    thin = max(1, length // _MOST_IN_STRETCH)
    stretches = np.lib.stride_tricks.sliding_window_view(wait, length)[::apart, ::thin]
    short = np.quantile(stretches, _SHORT_WAITS, axis=1)
    place = np.arange(len(wait))
    before = (place - length + 1) // apart
    after = place // apart
    return np.maximum(
        np.where(before >= 0, short[np.clip(before, 0, len(short) - 1)], 0.0),
        np.where(after < len(short), short[np.minimum(after, len(short) - 1)], 0.0),
    )


def find_stalled(step_ns: Floats, level: Floats) -> Bools:
    """The noise is that of the steps that are no stalls, so it is found in a few rounds."""
    beyond = step_ns / np.maximum(level, 1.0) - 1.0
    stalled = np.zeros(len(beyond), np.bool_)
    for _ in range(_ROUNDS):
        calm = beyond[~stalled]
        if not len(calm):
            break
        stalled = beyond > max(LEAST_EXCESS, _STALL_DEVIATIONS * spread(calm))
    return stalled


def _measured_pauses(
    step_ns: Floats, level: Floats, waits: Mapping[StallCause, Floats], *, hidden: bool
) -> dict[StallCause, Floats]:
    """What certain causes took in each step, where that is much of a typical step. A wait that may
    be hidden, behind a busy device or other ranks, counts only as far as the step took longer."""
    longer = np.maximum(step_ns - level, 0.0)
    left = longer if hidden else step_ns
    pauses: dict[StallCause, Floats] = {}
    rest = step_ns
    for cause in _PAUSES:
        if cause not in waits:
            continue
        wait = _beyond_short(waits[cause])
        least = LEAST_EXCESS * level
        if cause in _WAITS:
            usual = rest - np.minimum(wait, rest) if hidden else wait[wait <= median(wait)]
            least = np.maximum(least, _STALL_DEVIATIONS * spread(usual))
        most = np.minimum(left, longer) if cause == "collective" else left
        pauses[cause] = np.where(wait > least, np.minimum(most, wait), 0.0)
        left = left - pauses[cause]
        rest = rest - pauses[cause]
    return pauses


def _divide(excess: Floats, beyond: Mapping[StallCause, Floats]) -> dict[StallCause, Floats]:
    """Each step's excess among its causes; none gets more than is left of it."""
    left = excess.copy()
    shares: dict[StallCause, Floats] = {}
    for cause in _MOST_SPECIFIC_FIRST:
        if cause in beyond:
            shares[cause] = np.minimum(left, np.maximum(beyond[cause], 0.0))
            left = left - shares[cause]
    shares["unknown"] = left
    return shares


def _beyond_short(wait: Floats) -> Floats:
    """Beyond what steps around it wait for a short time: more than half of them may stall."""
    return np.maximum(wait - short_waits(wait), 0.0) if len(wait) else wait


def _beyond_typical(wait: Floats, stalled: Bools) -> Floats:
    calm = wait[~stalled]
    typical = median(calm) if len(calm) else 0.0
    return np.maximum(wait - typical, 0.0)


# Which steps count: plain ones, after the warm-up.
#
# Steps are taken in groups of five. Leading groups are warm-up while their median lies far above
# the medians of the run's second half: by more than 3.5 standard deviations (from the median
# absolute deviation) and more than 0.5%. Single steps at the beginning are looked at in the same
# way, and by more than 10%: one that takes seconds would weigh on the mean of hundreds, and no
# group's median shows it. If that holds for more than a quarter of the run, it is a slow spell or a
# drift, not a warm-up: then only first steps three times as long are left out. Steps that compile
# before the first one that does not are warm-up too. Where most steps have a backward pass, one
# without is none: a script that runs passes before it creates its optimizer may have its first step
# cut in two.
#
# The step right after a window, and the one after a step of our own (memory, the host's time), are
# left out when enough others are there. The profiler lets go of the device and its file is packed
# meanwhile; and our steps end with an empty queue, so the device waits for the first launches,
# which in the training's own steps the host has made long before.

GROUP = 5
FEWEST = 8 * GROUP  # steps whose groups show anything
_FEWEST_SINGLE = 8  # steps that show anything
_LONGEST = 0.25  # of the run
_FAR, _LEAST = 3.5, 0.005
_LEAST_SINGLE = (0.1, 2.0)  # the latter also before a slow spell


def find_steady(steps: StepColumns) -> tuple[Bools, int]:
    """Which steps count, and how many of the first ones are warm-up."""
    # Which steps have a backward pass; all, where most seem to have none.
    backward = steps.phases_ns.get("backward")
    if backward is None or not median(backward):
        have_passes: Bools = np.ones(len(steps), np.bool_)
    else:
        passes: Bools = backward > 0
        have_passes = passes
    plain = steps.plain & have_passes
    places = np.flatnonzero(plain)
    times = steps.step_ns[places].astype(np.float64)
    # How many of the first steps compile; none if all do.
    compile_ns = steps.phases_ns.get("compile")
    if compile_ns is None:
        compiling = 0
    else:
        calm = compile_ns[places] == 0
        compiling = int(calm.argmax()) if calm.any() else 0
    leading = max(warm_up(times), compiling)
    first = int(places[leading]) if leading < len(places) else len(steps)
    steady = plain.copy()
    steady[:first] = False
    # Whether the step before was the last of a window, or one that measured something else.
    ours = steps.window | steps.memory
    after = np.zeros(len(steps), np.bool_)
    after[1:] = ours[:-1] & (np.diff(steps.number) == 1)
    undisturbed = steady & ~(after & ~ours)
    enough = np.count_nonzero(undisturbed) >= _FEWEST_SINGLE
    return (undisturbed if enough else steady), first


def warm_up(steps: Floats) -> int:
    """How many of the first steps to leave out."""
    if len(steps) < _FEWEST_SINGLE:
        return 0
    single = max(_slow_beginning(steps, least) for least in _LEAST_SINGLE)
    if len(steps) < FEWEST:
        return single
    return max(single, GROUP * _slow_beginning(block_medians(steps, GROUP), _LEAST))


def _slow_beginning(times: Floats, least: float) -> int:
    """How many of the first ones lie far above the second half."""
    later = times[len(times) // 2 :]
    middle = median(later)
    calm = times - middle <= max(_FAR * spread(later), least * middle)
    first = int(calm.argmax())
    return first if first <= _LONGEST * len(times) else 0


# Whether stalls come at a fixed distance: every 4th step, every 50th.
#
# Stalls that follow each other directly are one burst, and count from where it begins. The distance
# may be one step off now and then. Two causes with periods of their own, such as an evaluation
# every 50 steps and a checkpoint every 80, show as two combs of steps; the one with more stalls
# comes first.

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


def find_period(numbers: Int64s) -> Period | None:
    """The period of most stalls, if it and other periods explain most of them. `numbers` are the
    stalled steps', in order."""
    periods = find_periods(numbers)
    return periods[0] if sum(period.share for period in periods) >= _OFTEN else None


def find_periods(numbers: Int64s) -> tuple[Period, ...]:
    """One for the distances of stalls as they follow each other, else one for each comb."""
    starts = _burst_starts(numbers)
    if len(starts) < _FEWEST:
        return ()
    # The commonest distance, where most distances are it or a multiple: a stall may be
    # missing, as the profiler ran or as it was short.
    gaps = np.diff(starts)
    steps = _commonest(gaps)
    times = np.maximum(np.rint(gaps / steps), 1)
    fits = np.abs(gaps - times * steps) <= _jitter(steps)
    direct = fits & (times == 1)
    share = float(fits.mean())
    if share < _OFTEN or direct.mean() < _OFTEN / 2 or _by_chance(gaps, direct, steps):
        single = None
    else:
        exact = int(np.rint(gaps[direct].mean()))
        single = Period(steps=exact, share=share)
    if single is not None and _is_filled(starts, single.steps, _FILLED):
        return (single,)
    combs = _from_combs(starts)
    if single is not None and _is_filled(starts, single.steps, _HALF_FILLED):
        better = sum(comb.share for comb in combs) >= _NEARLY_ALL * single.share
        return combs if better else (single,)
    return combs


def _burst_starts(numbers: Int64s) -> Int64s:
    if not len(numbers):
        return numbers
    starts: Int64s = numbers[np.concatenate(([True], np.diff(numbers) > 1))]
    return starts


def _by_chance(gaps: Int64s, direct: Bools, steps: int) -> bool:
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


def _from_combs(starts: Int64s) -> tuple[Period, ...]:
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


def _candidates(starts: Int64s) -> list[int]:
    """The commonest distances between stalls with at most three others between them."""
    reach = min(4, len(starts) - 1)
    gaps = np.concatenate([starts[lag:] - starts[:-lag] for lag in range(1, reach + 1)])
    distances, counts = np.unique(gaps, return_counts=True)
    return [int(distances[i]) for i in np.argsort(-counts, kind="stable")[:_MOST_CANDIDATES]]


def _on_comb(starts: Int64s, steps: int) -> Bools:
    """The stalls on the fullest comb of this period; none where too few of its steps stalled."""
    jitter = _jitter(steps)
    phases = starts % steps
    counts = np.bincount(phases, minlength=steps)
    near = sum((np.roll(counts, shift) for shift in range(-jitter, jitter + 1)), np.zeros(steps))
    phase = int(np.argmax(near))
    off = (phases - phase + steps // 2) % steps - steps // 2
    comb: Bools = np.abs(off) <= jitter
    slots = (int(starts[comb][-1]) - int(starts[comb][0])) / steps + 1
    crowded = (2 * jitter + 1) * len(starts) / max(1, int(starts[-1] - starts[0]))
    full = comb.sum() >= max(_FEWEST, _FILLED * slots) and crowded < 0.5 * _FILLED
    return comb if full else np.zeros(len(starts), np.bool_)


def _is_filled(starts: Int64s, steps: int, least: float) -> bool:
    """Whether so many of the steps at this distance stalled. Where not nearly all did, two periods
    may have it in common: 50 and 75 are multiples of 25."""
    return len(starts) >= least * ((int(starts[-1]) - int(starts[0])) / steps + 1)


def _commonest(gaps: Int64s) -> int:
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
