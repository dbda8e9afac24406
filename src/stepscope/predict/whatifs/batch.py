"""batch=N (or batch=x2): another number of samples per step."""

from __future__ import annotations

import re

from msgspec.structs import replace

from stepscope.predict.batch_size import grow_batch
from stepscope.predict.declaration import (
    Outcome,
    Refused,
    WrongValue,
)
from stepscope.predict.peaks import why_unsure
from stepscope.predict.step_context import StepContext

_FACTOR = re.compile(r"^x(\d+(?:\.\d+)?)$")


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses a number of samples if the trace's own batch is not known, and a whole graph."""
    factor = batch_factor(context, value)
    reading = context.batch_reading
    if reading is not None and reading.one_graph:
        raise Refused(
            f"batch={value}: every step reads the same {reading.size:,} rows. This may be one "
            "whole graph, which has no batch"
        )
    outcome = grow_batch(context, factor)
    said = (*outcome.assumptions, *why_unsure(context, context.grown * factor))
    return replace(outcome, assumptions=said)


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
        raise WrongValue(f"batch={value}: give at least one sample")
    reading = context.batch_reading
    if reading and reading.doubt:
        raise Refused(
            f"batch={value}: the trace shows {reading.size:,} ({reading.read_from}), but that "
            f"may not be the number of samples: {reading.doubt}. Give a factor, such as "
            "batch=x2"
        )
    if not context.batch:
        raise Refused(
            f"batch={value}: the trace does not say its batch size. Give a factor, such as batch=x2"
        )
    return wanted / context.batch
