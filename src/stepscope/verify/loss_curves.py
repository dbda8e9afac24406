"""Losses of two trainings side by side: how far apart they are, and what would be chance.

Differences are shares of the loss at that pass, or of half the mean loss where that is larger: a
loss near zero makes nothing large.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from stepscope.verify.spread import Floats

EARLY_PASSES = 5  # passes in which rounding has not grown much
_OF_MEAN = 0.5
FEWEST_LATER = 8  # passes in the later half: fewer give no mean
_LOOKED_AT = 10  # first passes that tell runs with other random numbers from rounding
_LIKE_SEEDS = 0.5  # of the noise from batch to batch: random numbers make that difference at once


class CurveDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Candidate minus baseline, as shares of the loss."""

    values: Floats
    largest: float
    gap: float  # mean of the later half
    scatter: float  # of the later half's values from pass to pass

    @property
    def has_later_half(self) -> bool:
        return len(self.values) >= 2 * FEWEST_LATER


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """What runs of the baseline do to each other, as shares of the loss."""

    reach: Floats  # the largest difference up to each pass
    gap: float  # the largest mean difference of the later half
    batch_noise: float  # deviation of the loss from batch to batch
    like_seeds: bool  # the runs differ as with other random numbers


def loss_size(baseline: Floats) -> Floats:
    """Per pass: the mean of the runs, which are rows, and at least half of the mean of all."""
    sizes = np.abs(baseline).mean(axis=0)
    least = max(_OF_MEAN * float(sizes.mean()), float(np.finfo(float).tiny))
    size: Floats = np.maximum(sizes, least)
    return size


def compare_curves(baseline: Floats, candidate: Floats) -> CurveDifference:
    """One run against the mean of the baseline's runs."""
    values = (candidate - baseline.mean(axis=0)) / loss_size(baseline)
    later = values[len(values) // 2 :]
    return CurveDifference(
        values=values,
        largest=float(np.abs(values).max()),
        gap=float(later.mean()),
        scatter=pass_noise(later),
    )


def control_of(baseline: Floats) -> Control:
    size = loss_size(baseline)
    noise = math.sqrt(float(np.mean([pass_noise(run) ** 2 for run in baseline])))
    noise /= float(size.mean())
    apart: list[Floats] = [(a - b) / size for a, b in combinations(baseline, 2)]
    reach = np.zeros(baseline.shape[1])
    for values in apart:
        reach = np.maximum(reach, np.maximum.accumulate(np.abs(values)))
    first = [float(np.sqrt((values[:_LOOKED_AT] ** 2).mean())) for values in apart]
    later = [abs(float(values[len(values) // 2 :].mean())) for values in apart]
    return Control(
        reach=reach,
        gap=max(later, default=0.0),
        batch_noise=noise,
        like_seeds=max(first, default=0.0) > _LIKE_SEEDS * noise > 0,
    )


def pass_noise(values: Floats) -> float:
    """The deviation from pass to pass, without a trend: from second differences."""
    if len(values) < 3:
        return 0.0
    return math.sqrt(float((np.diff(values, 2) ** 2).mean()) / 6)
