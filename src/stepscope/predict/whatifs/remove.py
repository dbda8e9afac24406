"""remove=REGEX: without kernels and operators of that name and the host's time for them."""

from __future__ import annotations

import re

from stepscope.predict.declaration import ApplyStage, Outcome, Refused, WhatIf, WrongValue, changed
from stepscope.predict.step_context import StepContext
from stepscope.predict.step_spans import shorten_gaps
from stepscope.records.trace import HostKind
from stepscope.step import edit
from stepscope.text.figures import milliseconds
from stepscope.text.words import counted


def apply(context: StepContext, value: str) -> Outcome:
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


WHATIF = WhatIf(
    name="remove",
    help="without kernels and operators whose name matches (remove=REGEX)",
    label="no {}",
    stage=ApplyStage.REMOVE,
    apply=apply,
    repeatable=True,
    needs_ceilings=False,
)
