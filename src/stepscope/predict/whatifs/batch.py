"""batch=N (or batch=x2): more samples a step. Kernels grow by their shapes, host time stays."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stepscope.predict.batch_growth import grow_batch
from stepscope.predict.outcome import Outcome, Refused, WrongValue

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext

HELP = "another batch size, as a number or a factor (x2)"
_FACTOR = re.compile(r"^x(\d+(?:\.\d+)?)$")


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses where the batch of the trace is not known and a number was asked for."""
    return grow_batch(context, batch_factor(context, value))


def batch_factor(context: StepContext, value: str) -> float:
    """New batch over old."""
    match = _FACTOR.match(value)
    if match and float(match[1]) > 0:
        return float(match[1])
    try:
        wanted = int(value)
    except ValueError:
        raise WrongValue(
            f"batch={value}: give a number of samples, or a factor such as x2"
        ) from None
    if wanted < 1:
        raise WrongValue(f"batch={value}: at least one sample")
    if not context.batch:
        raise Refused(f"batch={value}: the batch is not in the trace; give a factor such as x2")
    return wanted / context.batch
