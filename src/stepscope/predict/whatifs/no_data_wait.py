"""no-data-wait: batches are there when the step wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.work import DATA_LOADING, rows_named
from stepscope.predict.host_time import shorten_gaps
from stepscope.predict.outcome import Outcome, Refused, changed
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext

HELP = "batches are ready when the step wants them"


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses where no loading is recorded."""
    del value
    host = context.trace.host
    named = host.kind <= HostKind.ANNOTATION
    loading = np.flatnonzero(rows_named(context.trace, host, named, DATA_LOADING.search))
    if not len(loading):
        raise Refused("no-data-wait: this trace has no data loading to remove")
    graph, saved = shorten_gaps(context, loading)
    if saved <= 0:
        raise Refused("no-data-wait: the steps of this trace never wait for data")
    return Outcome(
        context=changed(context, graph),
        assumptions=(f"{saved / 1e6:.2f} ms per step inside the data loader removed",),
        spread=0.05,
    )
