"""Programs outside the job take the cores that the step needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.explain.machine_load import looked, lost_to_others, threads_take_part
from stepscope.records import remedies

if TYPE_CHECKING:
    from stepscope.records.explanation import Finding
    from stepscope.records.host_load import HostLoad, PlainSteps

_LEAST_CORES = 0.2


def find(evidence: RankEvidence) -> Finding | None:
    """Others keep cores busy while the training thread waits for one."""
    load, plain = looked(evidence.cpu)
    if load is None or plain is None or plain.waiting_share is None:
        return None
    others = lost_to_others(plain)
    share = plain.waiting_share
    if others < _LEAST_CORES or share < LOW:
        return None
    return RULE.finding(
        share=share,
        severity=severity(share),
        summary=f"other processes keep {others:.1f} of {_cores(load)} cores busy; for {share:.0%} "
        "of the step the training thread waits for a core.",
        evidence=tuple(_evidence(evidence, plain)),
        remedies=(
            remedies.IDLE_MACHINE.offer(
                "stop the other programs, or keep them off these cores (taskset, nice): "
                "every time measured here is too long",
            ),
            remedies.THREADS.offer("with fewer threads each of them gets a core sooner"),
        )[: 2 if threads_take_part(load, plain) else 1],
    )


def _cores(load: HostLoad) -> str:
    return f"{load.room:g}" if load.room else "the"


def _evidence(evidence: RankEvidence, plain: PlainSteps) -> list[str]:
    lines = [
        f"runnable without a core: {evidence.step_ms(plain.waiting_share or 0.0)} "
        f"(over {plain.steps} steps without the profiler)"
    ]
    if plain.others:
        named = ", ".join(f"{each.name} {each.cores:.1f}" for each in plain.others)
        lines.append(f"cores by program, of those still there at the end: {named}")
    if plain.stolen_cores >= _LEAST_CORES:
        lines.append(f"other virtual machines took {plain.stolen_cores:.1f} cores (steal time)")
    return lines


RULE = FindingRule(id="other-processes", scope="rank", title="Others use the machine", find=find)
