"""Time a function as one training step: warm-up, then rounds of several calls.

A round ends when the device has finished, so that the host may run ahead inside it as it does in
training. Rounds are the sample, and neighbouring ones may be alike (change.py). All of them
are of one start of one process: ONE_START stands for how much another start would differ.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from stepscope.records.normal import NORMAL_95_PRECISE
from stepscope.verify.change import Estimate, mean_ratio, mean_step, widen_for_starts
from stepscope.verify.spread import Floats
from stepscope.verify.steady import without_pauses

ROUNDS = 20
FEWEST_ROUNDS = 5
ONE_START = 0.01  # standard deviation of the step from start to start, as a share
_ROUND_S = 0.02  # a round takes at least this long
_MOST_S = 10.0  # of all rounds: a long step gets fewer
_WARM_UP_CALLS, _WARM_UP_S = 3, 0.05


class StepRounds(msgspec.Struct, frozen=True, kw_only=True):
    """The mean step of each round, and the mean of all with its 95% interval."""

    rounds_ms: tuple[float, ...]
    calls: int  # of each round
    ms: float
    low_ms: float
    high_ms: float


def time_step(
    step: Callable[[], object],
    *,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> StepRounds:
    """Call `step` until it is warm, then time it."""
    usual_s = _warm_up(step, clock)
    calls = max(1, math.ceil(_ROUND_S / max(usual_s, 1e-9)))
    rounds = min(rounds, max(FEWEST_ROUNDS, int(_MOST_S / max(usual_s * calls, 1e-9))))
    gc.collect()
    return summarise_rounds([_round_s(step, calls, clock) / calls for _ in range(rounds)], calls)


def summarise_rounds(seconds: Sequence[float], calls: int) -> StepRounds:
    """Summarise the mean steps of the rounds."""
    rounds_ms = [max(1e3 * value, 1e-9) for value in seconds]
    ms, low, high = mean_step([_counted(rounds_ms)])
    other_start = NORMAL_95_PRECISE * ONE_START * ms
    return StepRounds(
        rounds_ms=tuple(rounds_ms),
        calls=calls,
        ms=ms,
        low_ms=max(0.0, ms - math.hypot(ms - low, other_start)),
        high_ms=ms + math.hypot(high - ms, other_start),
    )


def rounds_change(base_ms: Sequence[float], now_ms: Sequence[float]) -> Estimate:
    """ln(now / base) of two starts' mean steps."""
    return widen_for_starts(mean_ratio([_counted(base_ms)], [_counted(now_ms)]), ONE_START)


def _counted(rounds_ms: Sequence[float]) -> Floats:
    return without_pauses(np.asarray(rounds_ms, np.float64))


def _warm_up(step: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of the last call: earlier ones compile and grow pools."""
    began, calls = clock(), 0
    while True:
        seconds = _round_s(step, 1, clock)
        calls += 1
        if calls >= _WARM_UP_CALLS and clock() - began >= _WARM_UP_S:
            return seconds


def _round_s(step: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        step()
    # Wait for CUDA, if the step uses it. torch is not imported for this.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return clock() - start
