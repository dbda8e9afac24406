"""Step times with a known change: synthetic lists, and real lists resampled in blocks.

A maker takes (random generator, rows, steps) and returns a table. Each row is one run of the same
workload, so every difference between two rows is chance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Maker = Callable[[np.random.Generator, int, int], Floats]
LISTS = Path(__file__).parent.parent / "tests/verify/steps"
NOISE = 0.02
BLOCK = 25


def independent(rng: np.random.Generator, rows: int, steps: int) -> Floats:
    return np.exp(NOISE * rng.standard_normal((rows, steps)))


def correlated(weight: float) -> Maker:
    """Each step depends on the one before: an autoregression with this weight."""

    def make(rng: np.random.Generator, rows: int, steps: int) -> Floats:
        noise = rng.standard_normal((rows, steps)) * np.sqrt(1 - weight**2)
        noise[:, 0] = rng.standard_normal(rows)
        for step in range(1, steps):
            noise[:, step] += weight * noise[:, step - 1]
        return np.exp(NOISE * noise)

    return make


def heavy_tails(rng: np.random.Generator, rows: int, steps: int) -> Floats:
    """Student's t with 1.5 degrees of freedom: no variance."""
    return np.exp(NOISE * np.clip(rng.standard_t(1.5, (rows, steps)), -100, 100))


def spikes(rng: np.random.Generator, rows: int, steps: int) -> Floats:
    """One step in twenty takes twice as long."""
    return independent(rng, rows, steps) * np.where(rng.random((rows, steps)) < 0.05, 2.0, 1.0)


def every_tenth(rng: np.random.Generator, rows: int, steps: int) -> Floats:
    """Every tenth step takes 1.5 times as long."""
    place = (np.arange(steps) + rng.integers(0, 10, (rows, 1))) % 10
    return independent(rng, rows, steps) * np.where(place == 0, 1.5, 1.0)


def stalls(often: float, longer: float, tail: float | None = None) -> Maker:
    """Some steps take `longer` steps more, with Pareto's heavy tail if one is given."""

    def make(rng: np.random.Generator, rows: int, steps: int) -> Floats:
        more = longer * (1 + rng.pareto(tail, (rows, steps)) if tail else np.ones((rows, steps)))
        stalled = rng.random((rows, steps)) < often
        return independent(rng, rows, steps) + np.where(stalled, more, 0.0)

    return make


def periodic(every: int, longer: float) -> Maker:
    """Every so-many-th step takes `longer` steps more."""

    def make(rng: np.random.Generator, rows: int, steps: int) -> Floats:
        place = (np.arange(steps) + rng.integers(0, every, (rows, 1))) % every
        return independent(rng, rows, steps) + np.where(place == 0, longer, 0.0)

    return make


def spells(slow: float, fast: float) -> Maker:
    """Slow spells, with steps 5% longer, and fast ones, with these mean lengths in steps."""

    def make(rng: np.random.Generator, rows: int, steps: int) -> Floats:
        is_slow = np.empty((rows, steps), np.bool_)
        is_slow[:, 0] = rng.random(rows) < slow / (slow + fast)
        draws = rng.random((rows, steps))
        for step in range(1, steps):
            before = is_slow[:, step - 1]
            is_slow[:, step] = np.where(
                before, draws[:, step] >= 1 / slow, draws[:, step] < 1 / fast
            )
        return np.exp(NOISE / 2 * rng.standard_normal((rows, steps))) * np.where(is_slow, 1.05, 1.0)

    return make


def drawn_again(steps_ms: Floats, block: int = BLOCK) -> Maker:
    """Blocks of a real list in random order, which keeps the correlation of neighbours."""

    def make(rng: np.random.Generator, rows: int, steps: int) -> Floats:
        starts = rng.integers(0, len(steps_ms), (rows, -(-steps // block)))
        places = (starts[:, :, None] + np.arange(block)) % len(steps_ms)
        return steps_ms[places.reshape(rows, -1)[:, :steps]]

    return make


MADE: dict[str, Maker] = {
    "independent": independent,
    "correlated 0.5": correlated(0.5),
    "correlated 0.9": correlated(0.9),
    "heavy tails": heavy_tails,
    "spikes": spikes,
    "every tenth": every_tenth,
    "spells 15/35": spells(15, 35),
    "spells 25/25": spells(25, 25),
}


# Means are decided by these, and medians do not see them.
STALLS: dict[str, Maker] = {
    "1 in 4, 1.4 steps longer": stalls(0.25, 1.4),
    "every 4th, 1.4 longer": periodic(4, 1.4),
    "every 100th, 10 longer": periodic(100, 10),
    "1 in 100, 4 longer": stalls(0.01, 4),
    "1 in 1000, 10 longer": stalls(0.001, 10),
    "1 in 20, tail 2.5": stalls(0.05, 0.6, 2.5),
    "1 in 50, tail 1.5": stalls(0.02, 1, 1.5),
    "1 in 20, tail 1.2": stalls(0.05, 1, 1.2),
}


def real_lists() -> dict[str, Floats]:
    """By name, in milliseconds: the lists that the method was chosen with."""
    return _lists(LISTS)


def unseen_lists() -> dict[str, Floats]:
    """Lists recorded after the method was settled."""
    return _lists(LISTS / "unseen")


def _lists(folder: Path) -> dict[str, Floats]:
    return {path.stem: np.loadtxt(path) for path in sorted(folder.glob("*.txt"))}
