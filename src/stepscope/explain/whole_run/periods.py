"""Whether stalls come at a fixed distance: every 4th step, every 50th."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FEWEST = 4  # stalls
_OFTEN = 0.7  # of the distances are the period, or a multiple of it


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """Stalls come every `steps` steps; `share` of their distances fit."""

    steps: int
    share: float


def find_period(numbers: NDArray[np.int64]) -> Period | None:
    """The commonest distance of stalled steps, where most distances are it or a multiple.

    Stalls that follow each other directly are one burst, and count from where it begins.
    """
    bursts = numbers[np.concatenate(([True], np.diff(numbers) > 1))] if len(numbers) else numbers
    gaps = np.diff(bursts)
    if len(bursts) < _FEWEST:
        return None
    distances, counts = np.unique(gaps, return_counts=True)
    steps = int(distances[np.argmax(counts)])
    share = float((gaps % steps == 0).mean())
    exact = float((gaps == steps).mean())
    return Period(steps=steps, share=share) if share >= _OFTEN and exact >= _OFTEN / 2 else None
