"""Gradients that DDP exchanges in every backward pass of a step, though only their sum is used."""

from __future__ import annotations

import numpy as np

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, RankEvidence, costliest_places
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.strategies.data_parallel import FORWARD
from stepscope.records import strategies
from stepscope.records.explanation import Place
from stepscope.records.strategies import RankDataParallel
from stepscope.records.trace import HostKind
from stepscope.step.work import rows_named
from stepscope.text.figures import percent, size
from stepscope.text.words import counted, plural


def find(evidence: RankEvidence) -> Finding | None:
    replicas = [s for s in evidence.strategies if isinstance(s, strategies.RankDataParallel)]
    part = max(replicas, key=lambda one: one.early_exposed_ns, default=None)
    if part is None or part.passes < 2:
        return None
    share = _share(evidence, part)
    if share < LOW:
        return None
    last = len(part.buckets) // part.passes
    first = f"first {part.passes - 1}" if part.passes > 2 else "first"
    return RULE.finding(
        share=share,
        summary=f"{percent(share)} of the step goes into exchanging gradients in the {first} of "
        f"{part.passes} backward passes. One exchange after the last pass is enough.",
        evidence=(
            f"exposed time before the last pass: {evidence.step_ms(share)}",
            f"{counted(len(part.buckets), 'all-reduce')} in a step of {part.passes} passes, where "
            f"{last} would be enough",
            *_bytes(part),
        ),
        where=_places(evidence),
        remedies=(
            remedies.SYNC_ONCE.offer(
                f"Run the {first} {plural(part.passes - 1, 'pass', 'passes')} of a step under "
                "DDP's no_sync(): gradients are then exchanged once a step"
            ),
        ),
    )


def _share(evidence: RankEvidence, part: RankDataParallel) -> float:
    """Of the budget's exposed communication, what the earlier passes cause in the window."""
    whole = evidence.timeline.exposed_comm_ns / max(1, evidence.cycles)
    if not whole:
        return 0.0
    return evidence.budget_share("exposed_comm") * min(1.0, part.early_exposed_ns / whole)


def _bytes(part: RankDataParallel) -> tuple[str, ...]:
    sizes = [bucket.size_bytes for bucket in part.buckets]
    known = [one for one in sizes if one is not None]
    if len(known) < len(sizes):
        return ()
    total = sum(known)
    return (f"{size(total)} are exchanged in a step instead of {size(total // part.passes)}",)


def _places(evidence: RankEvidence) -> tuple[Place, ...]:
    """The lines that call DDP's forward, where stacks were recorded."""
    trace, host = evidence.trace, evidence.trace.host
    named = rows_named(trace, host, host.kind == HostKind.ANNOTATION, lambda s: s == FORWARD)
    rows = np.flatnonzero(named).astype(np.int32)
    return costliest_places(trace, rows, host.dur_ns[rows])


RULE = FindingRule(id="exchange-every-pass", title="Gradients exchanged every pass", find=find)
