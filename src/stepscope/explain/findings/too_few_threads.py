"""Large operators run on few threads while cores stand idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.cpu_use import LONG_NS
from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.explain.machine_load import free_threads, idle_cores, looked
from stepscope.explain.threading_gain import speedup
from stepscope.records import remedies

if TYPE_CHECKING:
    from stepscope.records.explanation import Finding
    from stepscope.records.host_load import HostLoad

_LEAST_IDLE = 0.75  # cores


def find(evidence: RankEvidence) -> Finding | None:
    """Operators long enough to share, fewer threads than free cores, and cores measured idle."""
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
        severity=severity(share),
        summary=f"{idle:.1f} of {load.room or 0:g} cores are idle while {_threads(load)} "
        f"compute{'s' if load.threads == 1 else ''}: {fitting} threads could save {share:.0%} of "
        "the step.",
        evidence=(
            f"operators of {LONG_NS / 1e6:g} ms and more, which threads can share: "
            f"{evidence.step_ms(shared)}",
            f"the process keeps {plain.used_cores or 0.0:.1f} cores busy "
            f"(over {plain.steps} steps without the profiler)",
            *(f"{name}={value} is set" for name, value in load.variables.items() if "NUM" in name),
        ),
        remedies=(
            remedies.THREADS.offer(
                f"OMP_NUM_THREADS={fitting} (or torch.set_num_threads({fitting})): a "
                "thread for each core",
            ),
        ),
    )


def _threads(load: HostLoad) -> str:
    ranks = load.local_ranks or 1
    one = "1 thread" if load.threads == 1 else f"{load.threads} threads"
    return f"{one} of each rank" if ranks > 1 else one


RULE = FindingRule(id="too-few-threads", scope="rank", title="Cores stand idle", find=find)
