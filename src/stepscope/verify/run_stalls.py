"""One run's steady steps, divided into typical steps and stalls, as `explain` divides them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.whole_run.rank_run import explain_run
from stepscope.explain.whole_run.steady import find_steady
from stepscope.records.step_columns import StepColumns
from stepscope.records.whole_run import STALL_CAUSES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.step_columns import Flags
    from stepscope.records.whole_run import RankRun, Stall
    from stepscope.verify.spread import Floats


_MOST_NS = 2.0**62  # fits 64 bits; no step takes longer


class SteadySteps(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds; one value per steady step in each column."""

    warm_up: int  # steps left out at the beginning
    step_ms: Floats
    phases_ms: dict[str, Floats] = {}
    stalls_ms: dict[str, Floats] = {}  # by cause: what each step took longer for it


def find_steady_steps(steps: StepColumns) -> SteadySteps:
    """All plain steps after the warm-up, but for those that a window disturbed."""
    run = explain_run(steps)
    steady, _ = find_steady(steps)
    return SteadySteps(
        warm_up=int(steps.plain[: run.warm_up].sum()),
        step_ms=steps.step_ns[steady] / 1e6,
        phases_ms={phase: column[steady] / 1e6 for phase, column in steps.phases_ns.items()},
        stalls_ms={stall.cause: _stalls_ms(run, stall, steady) for stall in run.stalls},
    )


def _stalls_ms(run: RankRun, stall: Stall, steady: Flags) -> Floats:
    """Steps whose main cause it is bear all of its cost, in proportion to how long they took; all
    steps that stall do if it is never the main cause."""
    assert run.series is not None
    assert run.times is not None
    causes = run.series.cause[steady]
    chosen = causes == STALL_CAUSES.index(stall.cause)
    if not chosen.any():
        chosen = causes >= 0
    beyond = np.maximum(run.series.step_ns[steady] / 1e6 - run.times.typical_ms, 0.0)
    excess: Floats = np.where(chosen, beyond, 0.0)
    if not excess.any():
        return np.full(len(excess), stall.cost_ms)
    return excess * (stall.cost_ms / float(excess.mean()))


def columns_of_list(step_ms: Floats) -> StepColumns:
    """Step times of which nothing else is known."""
    count = len(step_ms)
    nothing: NDArray[np.bool_] = np.zeros(count, np.bool_)
    wall_ns = np.rint(np.clip(step_ms * 1e6, 1, _MOST_NS)).astype(np.int64)
    return StepColumns(
        number=np.arange(count),
        wall_ns=wall_ns,
        end_unix_ns=np.zeros(count, np.int64),
        phases_ns={},
        window=nothing,
        memory=nothing,
        whole=~nothing,
    )


def without_untimed(steps: StepColumns) -> StepColumns:
    """Where the device timed some steps, only those count: a host that runs ahead ends its steps
    early."""
    if steps.device_ns is None:
        return steps
    timed = steps.device_ns > 0
    if not (timed & steps.plain).any():
        return msgspec.structs.replace(steps, device_ns=None)
    return msgspec.structs.replace(steps, whole=steps.whole & timed)
