"""torch.compile compiles again in the middle of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import from_run
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.findings.run_words import (
    cost_lines,
    costly_stall,
    stalling_steps,
    typical_wait,
)
from stepscope.records import remedies

if TYPE_CHECKING:
    from stepscope.records.whole_run import RankRun


def find_in(run: RankRun) -> Finding | None:
    """Steps after the warm-up that compile."""
    stall = costly_stall(run, "compile")
    if stall is None:
        return None
    compiles = stalling_steps(stall, run, "compiles", "compile")
    return RULE.finding(
        share=stall.share,
        summary=f"{compiles} again, for {typical_wait(stall)}.",
        evidence=cost_lines(stall, run),
        where=stall.where,
        remedies=(
            remedies.MARK_DYNAMIC.offer(),
            remedies.STEADY_SHAPES.offer("pad batches to a few lengths: one graph for each"),
        ),
    )


RULE = FindingRule(id="recompiles", title="Recompilation", find=from_run(find_in))
