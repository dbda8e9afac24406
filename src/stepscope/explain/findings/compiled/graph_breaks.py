"""torch.compile splits the model where it cannot trace a line."""

from __future__ import annotations

from pathlib import PurePath

from stepscope.explain.findings.evidence import RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.compiled import BreakCost
from stepscope.records.explanation import Place
from stepscope.text.figures import milliseconds
from stepscope.text.words import counted, plural

_MOST = 5  # named one by one


def find(evidence: RankEvidence) -> Finding | None:
    """Breaks that the steps of the trace ran into."""
    breaks = evidence.compiled.breaks if evidence.compiled else ()
    ran = [one for one in breaks if one.times and one.cost_ms is not None]
    step_ms = evidence.budget.step_ms
    if not ran or not step_ms:
        # Older versions of torch do not mark compiled regions in a trace.
        regions = evidence.compiled.regions if evidence.compiled else ()
        if not breaks or not regions or any(region.region for region in regions):
            return None
        return RULE.finding(
            share=0.0,
            severity="low",
            summary=f"{_splits(len(breaks))} What this costs is not known.",
            evidence=tuple(_describe(one) for one in breaks[:_MOST]),
            where=tuple(one.place for one in breaks if one.place is not None)[:_MOST],
            remedies=(remedies.NO_BREAKS.offer(_advice(breaks[0])),),
        )
    cost_ms = sum(one.cost_ms or 0.0 for one in ran)
    share = min(1.0, cost_ms / step_ms)
    named = [*ran, *(one for one in breaks if one not in ran)][:_MOST]
    return RULE.finding(
        share=share,
        summary=f"{_splits(len(ran))} This costs {evidence.step_ms(share)}.",
        evidence=tuple(_describe(one) for one in named),
        where=tuple(one.place for one in named if one.place is not None),
        remedies=(remedies.NO_BREAKS.offer(_advice(ran[0])),),
    )


def _splits(lines: int) -> str:
    return (
        f"torch.compile cannot trace {counted(lines, 'line')}, which "
        f"{plural(lines, 'splits', 'split')} the model."
    )


def _describe(one: BreakCost) -> str:
    where = "a line that was not recorded"
    if one.place is not None:
        where = f"{_line_of(one.place)} in {one.place.function}"
    cost = milliseconds(one.cost_ms) if one.cost_ms is not None else "cost not known"
    return f"{where}: {cost}; {one.reason}"


def _line_of(place: Place) -> str:
    return f"{PurePath(place.file).name}:{place.line}"


def _advice(one: BreakCost) -> str:
    """Name the costliest line, with torch's own hint if there is one."""
    line = _line_of(one.place) if one.place is not None else "the costliest line"
    if one.hint:
        return f"Change {line}: {one.hint.rstrip('.')}"
    if one.place is None:
        return ""
    return (
        f"Rewrite {line} so that torch.compile can trace it, or move it out of the compiled "
        "function"
    )


RULE = FindingRule(id="graph-breaks", title="Graph breaks", find=find)
