"""The workload's own steps from the ones that capture saw."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.verify.spread import Floats


def captured_per_step(seen: int, trained: int) -> float:
    """Capture ends steps at optimizers: a step that trains a critic five times is five of them."""
    if not seen:
        return 1.0
    return float(round(seen / trained)) if seen >= 1.5 * trained else 1 / round(trained / seen)


def whole_steps(steps_ms: Floats, captured_per_step: float) -> Floats:
    """Sums of the captured steps that make one of the workload's."""
    if captured_per_step <= 1:
        return steps_ms * captured_per_step
    size = round(captured_per_step)
    whole = len(steps_ms) // size * size
    steps: Floats = steps_ms[:whole].reshape(-1, size).sum(axis=1)
    return steps
