"""remove=REGEX: without kernels and operators of that name and the host's time for them.
scale=REGEX:FACTOR: kernels (or host events) of that name take FACTOR times as long."""

from __future__ import annotations

import re

import numpy as np

from stepscope.predict.declaration import Outcome, Refused, WrongValue, changed
from stepscope.predict.step_context import StepContext
from stepscope.predict.step_spans import shorten_gaps
from stepscope.records.trace import HostKind
from stepscope.step import edit
from stepscope.text.figures import milliseconds
from stepscope.text.words import counted


def predict_without(context: StepContext, value: str) -> Outcome:
    """Refuses a pattern that matches nothing."""
    matches = compile_pattern(value).search
    chosen = edit.select(context.graph, context.trace, matches)
    graph, saved_ns, _ = shorten_gaps(context, HostKind.PYTHON, matches)
    if not chosen.tasks.any() and not chosen.calls.any() and saved_ns <= 0:
        raise Refused(f"remove={value}: no kernel, operator or annotation has such a name")
    kernels_ns = float(context.graph.tasks.dur_ns[chosen.tasks].sum())
    assumption = (
        f"{counted(int(chosen.tasks.sum()), 'kernel')} "
        f"({milliseconds(kernels_ns / 1e6)}) and "
        f"{counted(int(chosen.calls.sum()), 'call')} removed, with the CPU time before them"
    )
    if not chosen.calls.any():
        assumption = (
            f"{milliseconds(saved_ns / 1e6)} of CPU time removed. No call or kernel has such a name"
        )
    return Outcome(
        context=changed(context, edit.remove(graph, chosen)), assumptions=(assumption,), spread=0.03
    )


def compile_pattern(text: str) -> re.Pattern[str]:
    """Raises WrongValue for anything but a regular expression."""
    if not text:
        raise WrongValue("give a regular expression that matches names")
    try:
        return re.compile(text)
    except re.error as error:
        raise WrongValue(f"{text!r} is not a regular expression: {error}") from None


def predict_scaled(context: StepContext, value: str) -> Outcome:
    """Refuses a pattern that matches nothing."""
    names, _, number = value.rpartition(":")
    try:
        factor = float(number)
    except ValueError:
        factor = -1.0
    if not names or factor < 0 or not np.isfinite(factor):
        raise WrongValue(f"scale={value}: write REGEX:FACTOR, such as scale=gemm:0.5")
    matches = compile_pattern(names).search
    chosen = edit.select(context.graph, context.trace, matches)
    if chosen.tasks.any():
        graph = edit.scale_tasks(context.graph, chosen.tasks, factor)
        assumption = (
            f"the time of {counted(int(chosen.tasks.sum()), 'kernel')} is multiplied by {factor:g}"
        )
    else:
        graph, saved_ns, events = shorten_gaps(context, HostKind.PYTHON, matches, factor)
        own = chosen.calls & (graph.calls.call_ns > 0)
        graph = edit.scale_calls(graph, own, factor)
        if not saved_ns and not own.any():
            raise Refused(f"scale={value}: no kernel, operator or annotation has such a name")
        assumption = f"the CPU time of {counted(events, 'event')} is multiplied by {factor:g}"
    return Outcome(context=changed(context, graph), assumptions=(assumption,), spread=0.03)
