"""torch.compile splits the model where it cannot trace a line."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.figures import milliseconds
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.explain.findings.evidence import RankEvidence
    from stepscope.records.compiled import BreakCost

_MOST = 5  # named one by one


def find(evidence: RankEvidence) -> Finding | None:
    """Breaks that the steps of the trace ran into."""
    breaks = evidence.compiled.breaks if evidence.compiled else ()
    ran = [one for one in breaks if one.times and one.cost_ms is not None]
    step_ms = evidence.budget.step_ms
    if not ran or not step_ms:
        return _without_cost(evidence, breaks)
    cost_ms = sum(one.cost_ms or 0.0 for one in ran)
    share = min(1.0, cost_ms / step_ms)
    named = [*ran, *(one for one in breaks if one not in ran)][:_MOST]
    return RULE.finding(
        share=share,
        summary=f"{counted(len(ran), 'line')} that torch.compile cannot trace "
        f"{'splits' if len(ran) == 1 else 'split'} the model: that costs "
        f"{evidence.step_ms(share)}.",
        evidence=tuple(_describe(one) for one in named),
        where=tuple(one.place for one in named if one.place is not None),
        remedies=(remedies.NO_BREAKS.offer(_advice(ran[0])),),
    )


def _without_cost(evidence: RankEvidence, breaks: tuple[BreakCost, ...]) -> Finding | None:
    """Older versions of torch do not mark compiled regions in a trace."""
    regions = evidence.compiled.regions if evidence.compiled else ()
    if not breaks or not regions or any(region.region for region in regions):
        return None
    return RULE.finding(
        share=0.0,
        severity="low",
        summary=f"{counted(len(breaks), 'line')} that torch.compile cannot trace "
        f"{'splits' if len(breaks) == 1 else 'split'} the model; what that costs is not known.",
        evidence=tuple(_describe(one) for one in breaks[:_MOST]),
        where=tuple(one.place for one in breaks if one.place is not None)[:_MOST],
        remedies=(remedies.NO_BREAKS.offer(_advice(breaks[0])),),
    )


def _describe(one: BreakCost) -> str:
    where = "a line that was not recorded"
    if one.place is not None:
        where = f"{PurePath(one.place.file).name}:{one.place.line} in {one.place.function}"
    cost = milliseconds(one.cost_ms) if one.cost_ms is not None else "cost not known"
    return f"{where}: {cost}; {one.reason}"


def _advice(one: BreakCost) -> str:
    """Torch's own hint for the costliest one."""
    return f"at the costliest line: {one.hint}" if one.hint else ""


RULE = FindingRule(id="graph-breaks", title="Graph breaks", find=find)
