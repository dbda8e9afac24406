"""Steps in blocks, each with its median, and how much such blocks vary by chance.

Steps that follow each other are often slow together: another program runs for a while, a processor
is warm. Noise that is counted step by step would be too small then, so it is measured at several
lengths, and the largest counts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

OF_NORMAL = 1.4826  # standard deviations in a median absolute deviation
MEDIAN_COST = 1.2533  # a median varies by so much more than a mean
_FEWEST_DIFFERENCES = 25  # so that a few changes of level do not count as noise
_MOST_STEPS = 100_000  # that the noise of single steps is taken from
_REACH = 2  # blocks on each side that say where a block may lie
_LEAST_NOISE = 1e-4  # no clock sees less in a step


def block_medians(values: Floats, size: int) -> Floats:
    """One median per block; the rest at the end that fills no block is left out."""
    whole = len(values) // size * size
    medians: Floats = np.median(values[:whole].reshape(-1, size), axis=1)
    return medians


def without_outliers(blocks: Floats, noise: float) -> Floats:
    """Blocks that hold more stalls than steps, brought back to their neighbours' median."""
    if len(blocks) < 2 * _REACH + 1:
        return blocks
    padded = np.pad(blocks, _REACH, mode="edge")
    local = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * _REACH + 1), axis=1)
    clipped: Floats = np.clip(blocks, local - 3 * noise, local + 3 * noise)
    return clipped


def staying_power(residuals: Floats, noise: float) -> float:
    """How much longer than alone steps stay off together: the variance of a long mean, over that
    of independent steps. 1 for independent ones."""
    off = np.clip(residuals, -3 * noise, 3 * noise)
    off = off - off.mean()
    variance = float((off**2).sum())
    if len(off) < 3 or not variance:
        return 1.0
    # The levels are taken from the same few steps, so their correlation looks too small.
    correlation = float((off[1:] * off[:-1]).sum()) / variance
    correlation = (correlation + 3 / len(off)) / (1 - min(0.3, 4 / len(off)))
    correlation = min(max(correlation, 0.0), 0.98)
    return (1 + correlation) / (1 - correlation)


def spread(values: Floats) -> float:
    """Robust standard deviation."""
    if not len(values):
        return 0.0
    return OF_NORMAL * float(np.median(np.abs(values - np.median(values))))


def block_noise(blocks: Floats, size: int, one_step: float) -> float:
    """Standard deviation of one block's median of logarithms, as it counts for long means: the
    largest of what single steps, neighbouring blocks and neighbouring groups of blocks show.

    Differences of neighbours hardly notice a change of level, and their spread does not notice a
    steady growth at all.
    """
    noise = one_step * MEDIAN_COST / math.sqrt(size)
    length = 1
    while len(blocks) // length - 1 >= _FEWEST_DIFFERENCES:
        means = _group_means(blocks, length)
        noise = max(noise, spread(np.diff(means)) * math.sqrt(length / 2))
        length *= 2
    return noise


def step_noise(logs: Floats, blocks: Floats, size: int) -> float:
    """Standard deviation of one step around its block's median."""
    some = max(1, len(blocks) * size // _MOST_STEPS)
    steps = logs[: len(blocks) * size].reshape(-1, size)[::some]
    off = (steps - blocks[::some, None]).ravel()
    # The median's own step is not off at all, so blocks of few steps look too calm.
    return max(spread(off[off != 0.0]), _LEAST_NOISE)


def _group_means(blocks: Floats, length: int) -> Floats:
    whole = len(blocks) // length * length
    means: Floats = blocks[:whole].reshape(-1, length).mean(axis=1)
    return means
