"""Much of the run passes before training is at its pace."""

from __future__ import annotations

from stepscope.explain.findings.evidence import (
    account_part,
    as_short_run,
    from_run,
    length_severity,
)
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.run import RankRun
from stepscope.text.figures import duration, percent

_LEAST_SHARE = 0.05
_LEAST_MS = 10_000.0  # every Python process with torch takes some seconds
_WORDS = {
    "launch": "starting Python",
    "imports": "imports",
    "process_group": "joining the process group",
    "build": "building the model and the rest",
    "first_batch": "waiting for the first batch",
    "first_steps": "the first steps, with compiling and warm-up",
}


def find_in(run: RankRun) -> Finding | None:
    """Start-up and the first steps, of the wall time."""
    start, first = account_part(run, "start_up"), account_part(run, "first_steps")
    if run.account is None or start is None or first is None:
        return None
    ms, share = start.ms + first.ms, start.share + first.share
    if share < _LEAST_SHARE or ms < _LEAST_MS:
        return None
    parts = sorted((*(start.parts or (start,)), first), key=lambda part: -part.ms)
    trial = as_short_run(run, ms)
    cache, fast = remedies.KEEP_COMPILE_CACHE.offer(), remedies.FAST_START.offer()
    return RULE.finding(
        share=share,
        of="run",
        severity=length_severity(trial.share if trial else share, ms),
        summary=f"Training reaches its pace after {duration(1e6 * ms)}, {percent(share)} of the "
        f"{duration(1e6 * run.account.wall_ms)} run.",
        evidence=(
            ", ".join(
                f"{_WORDS.get(part.id, 'start-up')} {duration(1e6 * part.ms)}"
                for part in parts
                if part.ms >= 0.02 * ms
            ),
            *([trial.words] if trial else []),
        ),
        remedies=(cache, fast) if parts[0].id == "first_steps" else (fast, cache),
    )


RULE = FindingRule(id="start-up", title="Long start-up", find=from_run(find_in))
