"""Programs outside the job take cores that the step needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.machine_load import looked, lost_to_others, threads_take_part
from stepscope.records import remedies
from stepscope.records.figures import percent, significant
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.records.host_load import PlainSteps

_LEAST_CORES = 0.2


def find(evidence: RankEvidence) -> Finding | None:
    """Other processes keep cores busy while the training thread waits for one."""
    load, plain = looked(evidence.cpu)
    if load is None or plain is None or plain.waiting_share is None:
        return None
    others = lost_to_others(plain)
    cores = f"{load.room:g}" if load.room else "the"
    share = plain.waiting_share
    if others < _LEAST_CORES or share < LOW:
        return None
    return RULE.finding(
        share=share,
        summary=f"the training thread waits for a core for {percent(share)} of the step: other "
        f"processes keep {significant(others)} of {cores} cores busy.",
        evidence=tuple(_list_evidence(evidence, plain)),
        remedies=(
            remedies.IDLE_MACHINE.offer(),
            remedies.THREADS.offer("use fewer threads: each of them gets a core sooner"),
        )[: 2 if threads_take_part(load, plain) else 1],
    )


def _list_evidence(evidence: RankEvidence, plain: PlainSteps) -> Iterator[str]:
    yield (
        f"ready to run but without a core: {evidence.step_ms(plain.waiting_share or 0.0)} "
        f"({counted(plain.steps, 'step')} without the profiler)"
    )
    if plain.others:
        named = ", ".join(f"{other.name} {significant(other.cores)}" for other in plain.others)
        yield f"cores used by programs that still ran at the end: {named}"
    if plain.stolen_cores >= _LEAST_CORES:
        yield f"other virtual machines took {significant(plain.stolen_cores)} cores (steal time)"


RULE = FindingRule(id="other-processes", title="Other processes use the cores", find=find)
