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
        return None
    cost_ms = sum(one.cost_ms or 0.0 for one in ran)
    share = min(1.0, cost_ms / step_ms)
    return RULE.finding(
        share=share,
        summary=f"{counted(len(ran), 'line')} that torch.compile cannot trace "
        f"{'splits' if len(ran) == 1 else 'split'} the model: that costs "
        f"{evidence.step_ms(share)}.",
        evidence=tuple(_describe(one) for one in ran[:_MOST]),
        where=tuple(one.place for one in ran if one.place is not None)[:_MOST],
        remedies=(remedies.NO_BREAKS.offer(_advice(ran[0])),),
    )


def _describe(one: BreakCost) -> str:
    where = "a line that was not recorded"
    if one.place is not None:
        where = f"{PurePath(one.place.file).name}:{one.place.line} in {one.place.function}"
    return f"{where}: {milliseconds(one.cost_ms or 0.0)}; {one.reason}"


def _advice(one: BreakCost) -> str:
    """Torch's own hint for the costliest one."""
    return f"at the costliest line: {one.hint}" if one.hint else ""


RULE = FindingRule(id="graph-breaks", title="Graph breaks", find=find)
