"""Which steps count: plain ones, after the warm-up.

Steps are taken in groups of five. Leading groups are warm-up while their median lies far above the
medians of the run's second half: by more than 3.5 standard deviations (from the median absolute
deviation) and more than 0.5%. Single steps at the beginning are looked at in the same way, and by
more than 10%: one that takes seconds would weigh on the mean of hundreds, and no group's median
shows it. If that holds for more than a quarter of the run, it is a slow spell or a drift, not a
warm-up: then only first steps three times as long are left out. Steps that compile before the first
one that does not are warm-up too. Where most steps have a backward pass, one without is none: a
script that runs passes before it creates its optimizer may have its first step cut in two.

The step right after a window, and the one after a step of our own (memory, the host's time), are
left out when enough others are there. The profiler lets go of the device and its file is packed
meanwhile; and our steps end with an empty queue, so the device waits for the first launches, which
in the training's own steps the host has made long before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.step_columns import Flags, Ints, StepColumns

    Floats = NDArray[np.float64]

GROUP = 5
FEWEST = 8 * GROUP  # steps whose groups show anything
_FEWEST_SINGLE = 8  # steps that show anything
_LONGEST = 0.25  # of the run
_FAR, _LEAST = 3.5, 0.005
_LEAST_SINGLE = (0.1, 2.0)  # the latter also before a slow spell
_DEVIATIONS = 1.4826  # standard deviation of a normal distribution over its median absolute one


def find_steady(steps: StepColumns) -> tuple[Flags, int]:
    """Which steps count, and how many of the first ones are warm-up."""
    plain = steps.plain & _have_passes(steps)
    places = np.flatnonzero(plain)
    times = steps.step_ns[places].astype(np.float64)
    leading = max(warm_up(times), _count_compiling(steps.phases_ns.get("compile"), places))
    first = int(places[leading]) if leading < len(places) else len(steps)
    steady = plain.copy()
    steady[:first] = False
    undisturbed = steady & ~_follows_ours(steps)
    enough = np.count_nonzero(undisturbed) >= _FEWEST_SINGLE
    return (undisturbed if enough else steady), first


def _have_passes(steps: StepColumns) -> Flags:
    """Which steps have a backward pass; all, where most seem to have none."""
    backward = steps.phases_ns.get("backward")
    if backward is None or not np.median(backward):
        return np.ones(len(steps), np.bool_)
    passes: Flags = backward > 0
    return passes


def _follows_ours(steps: StepColumns) -> Flags:
    """Whether the step before was the last of a window, or one that measured something else."""
    ours = steps.window | steps.memory
    after = np.zeros(len(steps), np.bool_)
    after[1:] = ours[:-1] & (np.diff(steps.number) == 1)
    return after & ~ours


def warm_up(steps: Floats) -> int:
    """How many of the first steps to leave out."""
    if len(steps) < _FEWEST_SINGLE:
        return 0
    single = max(_slow_beginning(steps, least) for least in _LEAST_SINGLE)
    if len(steps) < FEWEST:
        return single
    return max(single, GROUP * _slow_beginning(group_medians(steps), _LEAST))


def _slow_beginning(times: Floats, least: float) -> int:
    """How many of the first ones lie far above the second half."""
    later = times[len(times) // 2 :]
    middle = float(np.median(later))
    deviation = _DEVIATIONS * float(np.median(np.abs(later - middle)))
    calm = times - middle <= max(_FAR * deviation, least * middle)
    first = int(calm.argmax())
    return first if first <= _LONGEST * len(times) else 0


def group_medians(steps: Floats) -> Floats:
    """Of each five steps."""
    whole = len(steps) // GROUP * GROUP
    medians: Floats = np.median(steps[:whole].reshape(-1, GROUP), axis=1)
    return medians


def _count_compiling(compile_ns: Ints | None, places: NDArray[np.intp]) -> int:
    """How many of the first steps compile; none if all do."""
    if compile_ns is None:
        return 0
    calm = compile_ns[places] == 0
    return int(calm.argmax()) if calm.any() else 0
