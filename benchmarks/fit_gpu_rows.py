"""Fit what a block of a softmax or a norm costs beside its bytes, in clock cycles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from scipy.optimize import minimize

from stepscope.predict.other_gpu import gpu as gpus
from stepscope.predict.other_gpu.gpu import RowFit
from stepscope.predict.other_gpu.kernel_time import find_operator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpu_tables import OpTimes
    from stepscope.predict.other_gpu.gpu import TransferFit

    Floats = NDArray[np.float64]

# How much of the cache rows fill is by eye: a norm writes its row while it reads it again.
FIRST_ROWS = {
    "softmax": RowFit(start_cycles=5000.0, step_cycles=2500.0, rereads_fit=0.95),
    "norm": RowFit(start_cycles=2000.0, step_cycles=2200.0, rereads_fit=0.5),
}
# Norms of 0.1 to 0.2 ms take 20% longer than longer ones suggest: more of the host is in them than
# the shortest times show.
_LEAST_MS = 0.2
_PULL = 0.1  # towards the first guess: start and step are hard to tell apart
_OLD_WEIGHT = 0.25  # Pascal's kernels count less
_BLUNT = 0.05  # errors below this hardly count


def fit_rows(fit: TransferFit, tables: Sequence[OpTimes]) -> TransferFit:
    for table in tables:
        family = find_operator(table.op).family
        if family in fit.rows and table.dtype == "fp32":
            fit = replace(fit, rows=fit.rows | {family: _fit_family(fit, table, family)})
    return fit


def _fit_family(fit: TransferFit, table: OpTimes, family: str) -> RowFit:
    known, launch = find_operator(table.op), fit.hidden_launch * fit.launch_ms[family]
    cases = []
    for name in table.gpus:
        row = gpus.find_row(name)
        shapes, ms = table.on(name, _LEAST_MS)
        if row is not None and len(ms):
            weight = _OLD_WEIGHT if row.generation in gpus.OLD_GENERATIONS else 1.0
            cases.append((gpus.make_gpu(row, fit), shapes, ms, weight))

    first = FIRST_ROWS[family]
    start = np.log([first.start_cycles, first.step_cycles])

    def loss(numbers: Floats) -> float:
        trial = replace(fit, rows=fit.rows | {family: _read(numbers, first)})
        total = _PULL * float(((numbers - start) ** 2).sum())
        for gpu, shapes, ms, weight in cases:
            error = np.log((launch + known.model(shapes, "fp32", gpu, trial)) / ms)
            total += weight * float(np.mean(np.sqrt(error**2 + _BLUNT**2)))
        return total

    numbers = minimize(loss, start, method="Nelder-Mead", options={"maxfev": 120}).x
    return _read(numbers, first)


def _read(numbers: Floats, first: RowFit) -> RowFit:
    start_cycles, step_cycles = np.exp(numbers).tolist()
    return replace(first, start_cycles=start_cycles, step_cycles=step_cycles)
