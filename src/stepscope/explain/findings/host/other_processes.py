"""Programs outside the job take cores that the step needs."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope import changes as remedies
from stepscope.explain.cpu_use import is_beside_others, looked, lost_to_others, threads_take_part
from stepscope.explain.findings.evidence import LOW, RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.rank_facts import PlainSteps
from stepscope.text.figures import percent, significant
from stepscope.text.words import counted

_LEAST_CORES = 0.2


def find(evidence: RankEvidence) -> Finding | None:
    """Other processes take a tenth of the cores, or some while the training thread waits for one.
    A tenth makes every other time doubtful: then this finding leads."""
    load, plain = looked(evidence.cpu)
    if load is None or plain is None:
        return None
    others, share = lost_to_others(plain), plain.waiting_share or 0.0
    leads = is_beside_others(evidence.cpu)
    if not leads and (others < _LEAST_CORES or share < LOW):
        return None
    cores = load.cores or load.room
    busy = f"{significant(others)} of {f'{cores:g}' if cores else 'the'} cores busy"
    waits = (
        f"The training thread waits for a core for {percent(share)} of the step because other "
        f"processes keep {busy}."
    )
    beside = f"Other processes keep {busy} during the steps, so every measured time is too long."
    return RULE.finding(
        share=share,
        severity="high" if leads else None,
        summary=waits if share >= LOW else beside,
        evidence=tuple(_list_evidence(evidence, plain)),
        remedies=(
            remedies.IDLE_MACHINE.offer(),
            remedies.THREADS.offer(
                "Set OMP_NUM_THREADS to fewer threads: each of them gets a core sooner"
            ),
        )[: 2 if threads_take_part(load, plain) else 1],
    )


def _list_evidence(evidence: RankEvidence, plain: PlainSteps) -> Iterator[str]:
    if plain.waiting_share is not None:
        yield (
            f"ready to run but without a core: {evidence.step_ms(plain.waiting_share)} "
            f"({counted(plain.steps, 'step')} without the profiler)"
        )
    if plain.others:
        named = ", ".join(f"{other.name} {significant(other.cores)}" for other in plain.others)
        yield f"cores used by programs that still ran at the end: {named}"
    if plain.stolen_cores >= _LEAST_CORES:
        yield f"other virtual machines took {significant(plain.stolen_cores)} cores (steal time)"


RULE = FindingRule(id="other-processes", title="Other processes use the cores", find=find)
