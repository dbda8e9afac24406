"""Copies that change nothing but how a tensor lies in memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.findings.evidence import (
    LOW,
    Evidence,
    costliest_places,
    kernel_severity,
)
from stepscope.explain.launched import by_kernel, by_operator, callers, launched_in
from stepscope.explain.tree import group, sum_by
from stepscope.records.explanation import Finding, Remedy
from stepscope.records.trace import HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.launched import Launched
    from stepscope.records.trace import Trace

TRANSPOSING = re.compile(r"(?:nchw|nhwc)To|batched_transpose|transpose_readWrite", re.IGNORECASE)
COPYING = re.compile(r"^aten::(?:copy_|clone)$")
LAYING_OUT = re.compile(r"^aten::(?:contiguous|reshape)$")


def find(evidence: Evidence) -> Finding | None:
    """Transposing kernels, and the copies that `contiguous` and `reshape` make."""
    if evidence.on_host:
        return None
    trace, timeline = evidence.trace, evidence.timeline
    launched = launched_in(trace, timeline.start_ns, timeline.start_ns + timeline.span_ns)
    in_convolution = by_kernel(trace, launched, TRANSPOSING.search)
    chosen = in_convolution | _laid_out(trace, launched)
    share = evidence.device_share(int(launched.dur_ns[chosen].sum()))
    if share < LOW:
        return None
    return Finding(
        id="layout-copies",
        title="Copies that only change layout",
        share=share,
        severity=kernel_severity(evidence, share),
        summary=f"{share:.0%} of the step is spent rewriting tensors in another order of "
        "dimensions; no value changes.",
        evidence=(
            f"{int(chosen.sum())} such kernels in the trace's steps, {evidence.ms(share)}",
            *_reasons(evidence, launched, chosen),
        ),
        where=costliest_places(trace, callers(trace, launched)[chosen], launched.dur_ns[chosen]),
        remedies=_remedies(bool(in_convolution.any())),
    )


def _laid_out(trace: Trace, launched: Launched) -> NDArray[np.bool_]:
    """Copies made by an operator that asks for another layout."""
    around = _around(trace, launched)
    known = by_operator(trace, launched, COPYING.match) & (around >= 0)
    if not known.any():
        return known
    names = trace.host.name[np.maximum(around, 0)]
    codes = np.unique(names[known]).tolist()
    laying = [code for code in codes if LAYING_OUT.match(trace.strings[code])]
    return known & np.isin(names, laying)


def _around(trace: Trace, launched: Launched) -> NDArray[np.int32]:
    """The nearest operator around each piece that is not itself a copy, or -1."""
    host = trace.host
    plain = [code for code, name in enumerate(trace.strings) if COPYING.match(name)]
    wanted = (host.kind == HostKind.OPERATOR) & ~np.isin(host.name, plain)
    return nearest_of(host, wanted, launched.operator)


def _reasons(evidence: Evidence, launched: Launched, chosen: NDArray[np.bool_]) -> list[str]:
    """The operators that asked for it, the costliest first."""
    trace, host = evidence.trace, evidence.trace.host
    around = _around(trace, launched)
    asks = chosen & (around >= 0)
    if not asks.any():
        return []
    laying = [code for code, name in enumerate(trace.strings) if LAYING_OUT.match(name)]
    outer = (host.kind == HostKind.OPERATOR) & ~np.isin(host.name, laying)
    asking = nearest_of(host, outer, np.where(asks, around, -1))
    asking = np.where(asking >= 0, asking, around)[asks]
    first, inverse, count = group(host.name[asking].astype(np.int64))
    total = sum_by(inverse, launched.dur_ns[asks], count)
    calls = np.bincount(inverse, minlength=count)
    return [
        f"for {_words(trace.strings[host.name[asking[first[i]]]])}: {calls[i]} kernels, "
        f"{evidence.ms(evidence.device_share(int(total[i])))}"
        for i in np.argsort(-total, kind="stable")[:3].tolist()
    ]


def _words(name: str) -> str:
    return name.removeprefix("autograd::engine::evaluate_function: ")


def _remedies(in_convolution: bool) -> tuple[Remedy, ...]:
    fuse = Remedy(id="compile", summary="torch.compile folds such copies into their neighbours")
    if not in_convolution:
        return (fuse,)
    keep = "model.to(memory_format=torch.channels_last), and the input too: convolutions need none"
    return (Remedy(id="channels-last", summary=keep), fuse)
