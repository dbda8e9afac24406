"""Copies that only change a tensor's layout in memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, RankEvidence, costliest_places, kernel_severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.kernels import Launched, by_kernel, by_operator, callers
from stepscope.records.explanation import Remedy
from stepscope.records.trace import HostKind, Trace
from stepscope.step.call_tree import group, sum_by
from stepscope.step.work import named, one_of, rows_named
from stepscope.text.figures import percent
from stepscope.text.words import counted
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.step.arrays import Bools, Int32s

TRANSPOSING = one_of("nchwto nhwcto batched_transpose transpose_readwrite")
COPYING = re.compile(r"^aten::(?:copy_|clone)$")
BACKWARD = "autograd::engine::evaluate_function: "
LAYING_OUT = re.compile(r"^aten::(?:contiguous|reshape)$")


def find(evidence: RankEvidence) -> Finding | None:
    """Transposing kernels, and the copies that `contiguous` and `reshape` make."""
    if evidence.on_host:
        return None
    trace, launched = evidence.trace, evidence.launched
    in_convolution = by_kernel(trace, launched, TRANSPOSING)
    # The nearest operator around each kernel that is not itself a copy, or -1.
    around = nearest_of(trace.host, _operators_but(trace, COPYING), launched.operator)
    chosen = in_convolution | _select_layout_copies(trace, launched, around)
    share = evidence.device_share(int(launched.dur_ns[chosen].sum()))
    if share < LOW:
        return None
    return RULE.finding(
        share=share,
        severity=kernel_severity(evidence, share),
        summary=f"{percent(share)} of the step goes into copies that only change a tensor's memory "
        "layout, not its values.",
        evidence=(
            f"{counted(int(chosen.sum()), 'such kernel')} in the recorded steps: "
            f"{evidence.step_ms(share)}",
            *_list_causes(evidence, chosen, around),
        ),
        where=costliest_places(trace, callers(trace, launched)[chosen], launched.dur_ns[chosen]),
        remedies=_offer(bool(in_convolution.any())),
    )


def _operators_but(trace: Trace, these: re.Pattern[str]) -> Bools:
    operator: Bools = trace.host.kind == HostKind.OPERATOR
    return operator & ~rows_named(trace, trace.host, operator, these.match)


def _select_layout_copies(trace: Trace, launched: Launched, around: Int32s) -> Bools:
    """Copies made by an operator that changes the layout."""
    known = by_operator(trace, launched, COPYING.match) & (around >= 0)
    if not known.any():
        return known
    return named(trace, trace.host.name[around], known, LAYING_OUT.match)


def _list_causes(evidence: RankEvidence, chosen: Bools, around: Int32s) -> list[str]:
    """The operators that caused the copies, the costliest first."""
    trace, host = evidence.trace, evidence.trace.host
    asks = chosen & (around >= 0)
    if not asks.any():
        return []
    asking = nearest_of(host, _operators_but(trace, LAYING_OUT), np.where(asks, around, -1))
    asking = np.where(asking >= 0, asking, around)[asks]
    first, inverse, count = group(host.name[asking])
    total = sum_by(inverse, evidence.launched.dur_ns[asks], count)
    calls = np.bincount(inverse, minlength=count)
    return [
        f"for {trace.strings[host.name[asking[first[i]]]].removeprefix(BACKWARD)}: "
        f"{counted(int(calls[i]), 'kernel')}, "
        f"{evidence.step_ms(evidence.device_share(int(total[i])))}"
        for i in np.argsort(-total, kind="stable")[:3].tolist()
    ]


def _offer(in_convolution: bool) -> tuple[Remedy, ...]:
    fuse = remedies.COMPILE.offer(
        "Call torch.compile(model): it folds such copies into the kernels beside them"
    )
    if not in_convolution:
        return (fuse,)
    keep = "Convert model and inputs to torch.channels_last: convolutions then need no copies"
    return (remedies.CHANNELS_LAST.offer(keep), fuse)


RULE = FindingRule(id="layout-copies", title="Copies that only change layout", find=find)
