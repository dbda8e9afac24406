"""Large operators run on few threads while cores are idle."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.cpu_use import LONG_NS, free_threads, idle_cores, looked, speedup
from stepscope.explain.findings.evidence import LOW, RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.rank_facts import HostLoad
from stepscope.text.figures import percent, significant
from stepscope.text.words import counted

_LEAST_IDLE = 0.75  # cores


def find(evidence: RankEvidence) -> Finding | None:
    """Operators are long enough to share, and cores are measured to be idle."""
    use = evidence.cpu
    load, plain = looked(use)
    if use is None or load is None or plain is None:
        return None
    idle = idle_cores(load, plain)
    fitting = free_threads(load)
    if idle is None or idle < _LEAST_IDLE or fitting <= load.threads:
        return None
    shared = use.long_share * evidence.budget_share("compute")
    share = shared * (1 - 1 / speedup(load.threads, fitting))
    if share < LOW:
        return None
    return RULE.finding(
        share=share,
        summary=f"{significant(idle)} of {load.room or 0:g} cores are idle while {_threads(load)} "
        f"compute{'s' if load.threads == 1 else ''}. Operators that {fitting} threads can share "
        f"take {percent(shared)} of the step.",
        evidence=(
            f"operators of {LONG_NS / 1e6:g} ms and more, which threads can share: "
            f"{evidence.step_ms(shared)}",
            f"the process keeps {significant(plain.used_cores or 0.0)} cores busy "
            f"({counted(plain.steps, 'step')} without the profiler)",
            *(f"{name}={value} is set" for name, value in load.variables.items() if "NUM" in name),
        ),
        remedies=(
            remedies.THREADS.offer(
                f"Set OMP_NUM_THREADS={fitting}, or call torch.set_num_threads({fitting}): one "
                "thread for each core"
            ),
        ),
    )


def _threads(load: HostLoad) -> str:
    ranks = load.local_ranks or 1
    threads = counted(load.threads, "thread")
    return f"{threads} of each rank" if ranks > 1 else threads


RULE = FindingRule(id="too-few-threads", title="Idle cores", find=find)
