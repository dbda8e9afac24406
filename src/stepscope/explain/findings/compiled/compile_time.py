"""Compiling takes much of the run."""

from __future__ import annotations

from stepscope.explain.findings.evidence import RankEvidence, as_short_run, length_severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.compiled import CompiledWork
from stepscope.records.explanation import Remedy
from stepscope.text.figures import duration, percent
from stepscope.text.words import counted

_LEAST_SHARE = 0.05
_LEAST_S = 10.0  # as for start-up


def find(evidence: RankEvidence) -> Finding | None:
    """Dynamo's own times of its compilations, of the command's wall time."""
    compiled, run = evidence.compiled, evidence.run
    if compiled is None or compiled.compile_s is None or run is None or run.account is None:
        return None
    seconds, wall_s = compiled.compile_s, run.account.wall_ms / 1e3
    share = min(1.0, seconds / wall_s) if wall_s else 0.0
    if share < _LEAST_SHARE or seconds < _LEAST_S:
        return None
    trial = as_short_run(run, 1e3 * seconds)
    lines = [counted(compiled.compilations or 0, "compilation")]
    if compiled.cold_s is not None and compiled.cached_s is not None:
        lines[0] += (
            f": {duration(1e9 * compiled.cold_s)} of compiling, "
            f"{duration(1e9 * compiled.cached_s)} of loading from a cache"
        )
    again = sum(one.seconds for one in compiled.recompiled)
    if again:
        lines.append(f"{duration(1e9 * again)} of it recompiled a function")
    return RULE.finding(
        share=share,
        of="run",
        severity=length_severity(trial.share if trial else share, 1e3 * seconds),
        summary=f"torch.compile compiled for {duration(1e9 * seconds)}, {percent(share)} of the "
        f"{duration(1e9 * wall_s)} run.",
        evidence=(*lines, *([trial.words] if trial else [])),
        remedies=_offer(compiled),
    )


def _offer(compiled: CompiledWork) -> tuple[Remedy, ...]:
    """A cache helps with what no cache had; one block compiled once helps in any case."""
    regional = remedies.COMPILE_BLOCKS.offer()
    if compiled.cold_s is not None and compiled.cold_s < (compiled.cached_s or 0.0):
        return (regional,)
    return (remedies.KEEP_COMPILE_CACHE.offer(), regional)


RULE = FindingRule(id="compile-time", title="Long compilation", find=find)
