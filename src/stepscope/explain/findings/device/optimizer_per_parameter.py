"""An optimizer that updates one parameter at a time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, RankEvidence, costliest_places
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.kernels import Launched, by_operator
from stepscope.step.call_tree import group
from stepscope.step.phases import in_optimizer_step
from stepscope.text.figures import duration, milliseconds, percent, significant
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.step.arrays import Bools, Int32s

FEWEST_PARAMETERS = 20
# Operators on one tensor; `_foreach_` and `_fused_` operators take a list.
ONE_TENSOR = re.compile(r"^aten::(?!_foreach|_fused)")


def find(evidence: RankEvidence) -> Finding | None:
    """Kernels under `Optimizer.step#` launched by operators on one tensor."""
    if evidence.on_host:
        return None
    trace, launched = evidence.trace, evidence.launched
    step = in_optimizer_step(trace, trace.device.launch[launched.rows])
    inside = step >= 0
    single = inside & by_operator(trace, launched, ONE_TENSOR.match)
    steps = len(distinct(step[single]))
    parameters = _count_parameters(evidence, launched, single) / max(1, steps)
    if parameters < FEWEST_PARAMETERS or 2 * single.sum() < inside.sum():
        return None
    span_ns = _measure_span_ns(evidence, launched, step)
    worked_ns = min(span_ns, int(launched.dur_ns[inside].sum()))
    share = min(1.0, evidence.device_share(worked_ns) + evidence.idle_share(span_ns - worked_ns))
    if share < LOW:
        return None
    kernels = int(inside.sum()) / steps
    return RULE.finding(
        share=share,
        summary=f"The optimizer takes {percent(share)} of the step because it launches "
        f"{kernels:,.0f} kernels, one parameter at a time.",
        evidence=(
            f"from its first kernel to its last: {evidence.step_ms(share)}, with kernels running "
            f"for {milliseconds(evidence.device_share(worked_ns) * evidence.budget.step_ms)}",
            f"about {parameters:,.0f} parameters, {significant(kernels / parameters)} kernels each",
            f"a kernel runs {duration(float(launched.dur_ns[inside].mean()))} on average",
        ),
        where=costliest_places(trace, step[inside], launched.dur_ns[inside]),
        remedies=(
            remedies.FUSED_OPTIMIZER.offer(
                "Pass fused=True or foreach=True to the optimizer: one kernel then updates many "
                "parameters"
            ),
            remedies.CUDA_GRAPHS.offer(),
        ),
    )


def _count_parameters(evidence: RankEvidence, launched: Launched, single: Bools) -> int:
    """Number of parameters: the fewest calls among the frequent operators, as each parameter needs
    one call of each."""
    if not single.any():
        return 0
    host = evidence.trace.host
    calls = distinct(launched.operator[single])
    _, inverse, _ = group(host.name[calls])
    counts = np.bincount(inverse)
    return int(counts[2 * counts >= counts.max()].min())


def _measure_span_ns(evidence: RankEvidence, launched: Launched, step: Int32s) -> int:
    """From first start to last end of each optimizer step's kernels, summed."""
    rows = launched.rows[step >= 0]
    start = evidence.trace.device.start_ns[rows]
    first, which, count = group(step[step >= 0])
    begins, ends = start[first].copy(), start[first].copy()
    np.minimum.at(begins, which, start)
    np.maximum.at(ends, which, start + launched.dur_ns[step >= 0])
    return int((ends - begins).sum()) if count else 0


RULE = FindingRule(id="optimizer-per-parameter", title="Optimizer loops over parameters", find=find)
