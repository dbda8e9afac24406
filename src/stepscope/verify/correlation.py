"""The correlation time tau: how many steps of a run are as informative as one independent step.

n values average out as n / tau independent ones do. tau is the variance of a long average over that
of independent values, which is the spectrum at frequency zero. It is estimated from the slowest
cosines of the values. Each cosine is one degree of freedom, so the estimate comes with its own
uncertainty. Few cosines stay near frequency zero but are uncertain, many are certain but leave it:
0.2 n^(2/3) are used, and down to half of that if correlations reach far.

docs/records/comparison.md has the formulas; benchmarks/comparison.py tests them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_MOST_COSINES, _FEWEST_COSINES, _OF_EFFECTIVE = 0.2, 0.1, 0.15
_LONGEST_LAG = 0.1  # of the run
_SHORTEST = 0.2  # alternating steps are more informative than independent ones, but not by much
_ROUNDS = 3


def correlation_times(rows: Floats) -> tuple[Floats, Floats]:
    """tau of each row, and its degrees of freedom."""
    n = rows.shape[1]
    centred = rows - rows.mean(axis=1, keepdims=True)
    power = (centred**2).mean(axis=1)
    waves = np.fft.rfft(centred, 2 * n)
    lags = min(2 * max(1, int(_LONGEST_LAG * n / 2)), n)
    rough = _sum_of_correlations(np.fft.irfft(np.abs(waves) ** 2, 2 * n)[:, :lags], n)
    fewest, most = (
        min(max(share * n ** (2 / 3), least), n - 1)
        for share, least in ((_FEWEST_COSINES, 2), (_MOST_COSINES, 3))
    )
    used = np.rint(np.clip(_OF_EFFECTIVE * n / rough, fewest, most)).astype(np.int64)
    numbers = np.arange(1, int(used.max()) + 1)
    turned = waves[:, numbers] * np.exp(-0.5j * math.pi * numbers / n)
    spectrum = 2 * turned.real**2 / n
    decay = 1 / (1 + (math.pi / 2 * numbers * rough[:, None] / n) ** 2)
    last = (np.arange(len(rows)), used - 1)
    at_zero = np.cumsum(spectrum, axis=1)[last] / np.cumsum(decay, axis=1)[last]
    varies = power > 0
    tau = np.clip(at_zero / np.where(varies, power, 1.0), _SHORTEST, n / 2)
    return np.where(varies, tau, 1.0), used.astype(np.float64)


def _sum_of_correlations(products: Floats, n: int) -> Floats:
    """A rough tau of each row: one plus twice the correlations at all lags.

    Lags are added in pairs while pairs are positive and not growing (Geyer's sequence). Subtracting
    the mean of few values takes tau / n off each correlation, which is added back.
    """
    power = products[:, :1]
    correlations = products / np.where(power > 0, power, 1.0)
    longer = n / (n - np.arange(correlations.shape[1]))
    tau = np.ones((len(correlations), 1))
    for _ in range(_ROUNDS):
        lost = np.minimum(tau / n, 0.5)
        lags = (correlations * (1 - lost) + lost) * longer
        lags[:, 0] = 1.0
        pairs = np.minimum.accumulate(lags[:, 0::2] + lags[:, 1::2], axis=1)
        tau = 2 * np.maximum(pairs, 0.0).sum(axis=1, keepdims=True) - 1
        tau = np.clip(tau, 1.0, n / 2)
    out: Floats = tau[:, 0]
    return out
