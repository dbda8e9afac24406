"""remove=REGEX: without the kernels and operators of these names, and the host's time for them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.work import rows_named
from stepscope.predict import edit
from stepscope.predict.host_time import shorten_gaps
from stepscope.predict.outcome import Outcome, Refused, WrongValue, changed
from stepscope.records.trace import HostKind
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext

HELP = "without kernels and operators whose name matches"


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses a pattern that matches nothing."""
    matches = pattern(value).search
    chosen = edit.select(context.graph, context.trace, matches)
    host = context.trace.host
    said = host.kind <= HostKind.PYTHON
    graph, saved = shorten_gaps(
        context, np.flatnonzero(rows_named(context.trace, host, said, matches))
    )
    if not chosen.tasks.any() and not chosen.calls.any() and saved <= 0:
        raise Refused(f"remove={value}: no kernel, operator or annotation has such a name")
    tasks = float(context.graph.tasks.dur_ns[chosen.tasks].sum())
    told = (
        f"{counted(int(chosen.tasks.sum()), 'kernel')} ({tasks / 1e6:.2f} ms) and "
        f"{counted(int(chosen.calls.sum()), 'call')} removed with the host's time that led to them"
    )
    if not chosen.calls.any():
        told = f"{saved / 1e6:.3g} ms of the host's time removed; no call or kernel has such a name"
    return Outcome(
        context=changed(context, edit.remove(graph, chosen)),
        assumptions=(told,),
        spread=0.03,
    )


def pattern(text: str) -> re.Pattern[str]:
    """Refuses what is no regular expression."""
    if not text:
        raise WrongValue("give a regular expression that matches names")
    try:
        return re.compile(text)
    except re.error as error:
        raise WrongValue(f"{text!r} is no regular expression: {error}") from None
