"""Where a script's step time changed from one run to the next: a permutation test on ranks.

The runs are cut where the ranks of their step times differ most between the two sides. How often
chance alone reaches that much, over all places of a cut, is counted on the same runs in random
order. Ranks are used so that a single odd run decides nothing. Each side of a cut is tested again
at half the level. Then every cut is placed and tested anew between its neighbours.

Error: of series without any change, at most 1 in 100 shows one. This holds for any distribution of
the noise as long as the runs are exchangeable: a machine that is slow for days breaks it. The
interval is that of Hodges and Lehmann for the two stretches; it does not know that the place of the
cut was chosen from the same runs, and is a little too narrow for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.normal import NORMAL_95_PRECISE, median

Floats = NDArray[np.float64]

LEVEL = 0.01
MOST_RUNS = 1000  # the newest ones
FEWEST_RUNS = 10  # with fewer no cut can be told from chance
_SHUFFLES = 999
_AT_ONCE = 111  # shuffles held in memory
_FEWEST_ON_A_SIDE = 3
_MOST_PAIRED = 300  # runs on each side of a cut that its size is computed from, the nearest


class RunLevelChange(msgspec.Struct, frozen=True, kw_only=True):
    """From run `at` on, steps take longer or shorter."""

    at: int  # position of the first run of the new level
    before_ms: float  # median of the runs since the change before it
    after_ms: float
    change: float  # share of the step before; Hodges and Lehmann's estimate
    low: float | None  # 95% interval of `change`; None with too few runs
    high: float | None
    chance: float  # how often chance alone reaches as much


def find_run_changes(step_ms: Sequence[float]) -> tuple[RunLevelChange, ...]:
    """Find changes in the order of the runs, which is that of time. All step times must be above
    zero."""
    logs = np.log(np.asarray(step_ms, np.float64))
    if len(logs) < FEWEST_RUNS:
        return ()
    skipped = max(0, len(logs) - MOST_RUNS)
    logs = logs[skipped:]
    cuts = _split(logs, 0, len(logs), LEVEL)
    edges = [0, *_confirmed(logs, cuts), len(logs)]
    return tuple(
        _describe(logs, skipped, *stretch)
        for stretch in zip(edges, edges[1:], edges[2:], strict=False)
    )


def _split(logs: Floats, start: int, end: int, level: float) -> list[int]:
    """The cut of this stretch, if it is no chance, and those on both sides of it."""
    cut, chance = _best_cut(logs[start:end])
    if cut is None or chance > level:
        return []
    at = start + cut
    return [*_split(logs, start, at, level / 2), at, *_split(logs, at, end, level / 2)]


def _confirmed(logs: Floats, cuts: list[int]) -> list[int]:
    """Each cut moved to the best place between its neighbours; the least sure go, one by one."""
    while cuts:
        edges = [0, *cuts, len(logs)]
        best = [
            (start, *_best_cut(logs[start:end]))
            for start, end in zip(edges, edges[2:], strict=False)
        ]
        chances = [1.0 if cut is None else chance for _, cut, chance in best]
        worst = int(np.argmax(chances))
        if chances[worst] <= LEVEL:
            return [start + cut for start, cut, _ in best if cut is not None]
        cuts = cuts[:worst] + cuts[worst + 1 :]
    return []


def _best_cut(logs: Floats) -> tuple[int | None, float]:
    """Return where two sides differ most, and how often chance does as much; None if too short."""
    if len(logs) < FEWEST_RUNS:
        return None, 1.0
    ranks = _ranks(logs)
    scores = _scores(ranks[np.newaxis])[0]
    reached = scores.max() * (1 - 1e-12)  # equal sums may differ in their last bits
    random = np.random.default_rng(len(logs))
    at_least = 0
    for _ in range(_SHUFFLES // _AT_ONCE):
        shuffled = random.permuted(np.tile(ranks, (_AT_ONCE, 1)), axis=1)
        at_least += int((_scores(shuffled).max(axis=1) >= reached).sum())
    return _FEWEST_ON_A_SIDE + int(scores.argmax()), (1 + at_least) / (1 + _SHUFFLES)


def _scores(ranks: Floats) -> Floats:
    """Return for each possible cut of each row the sides' difference, over its deviation."""
    runs = ranks.shape[1]
    sums = np.cumsum(ranks - ranks.mean(axis=1, keepdims=True), axis=1)
    left = np.arange(_FEWEST_ON_A_SIDE, runs - _FEWEST_ON_A_SIDE + 1)
    scores: Floats = np.abs(sums[:, left - 1]) / np.sqrt(left * (runs - left) / runs)
    return scores


def _ranks(values: Floats) -> Floats:
    """Equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


def _describe(logs: Floats, skipped: int, start: int, at: int, end: int) -> RunLevelChange:
    before, after = logs[start:at], logs[at:end]
    differences = np.sort(
        (after[np.newaxis, :_MOST_PAIRED] - before[-_MOST_PAIRED:, np.newaxis]).ravel()
    )
    low, high = _interval(
        differences, min(len(before), _MOST_PAIRED), min(len(after), _MOST_PAIRED)
    )
    _, chance = _best_cut(logs[start:end])
    return RunLevelChange(
        at=skipped + at,
        before_ms=float(np.exp(median(before))),
        after_ms=float(np.exp(median(after))),
        change=math.expm1(median(differences)),
        low=low,
        high=high,
        chance=chance,
    )


def _interval(differences: Floats, before: int, after: int) -> tuple[float | None, float | None]:
    """The order statistics that Mann and Whitney's test would not reject, by its normal limit."""
    pairs = before * after
    reach = NORMAL_95_PRECISE * math.sqrt(pairs * (before + after + 1) / 12)
    first = math.floor(pairs / 2 - reach)
    if first < 1:
        return None, None
    return math.expm1(float(differences[first - 1])), math.expm1(float(differences[pairs - first]))
