"""The device waits for Python itself: code between operators, not the operators."""

from __future__ import annotations

from stepscope.explain.findings.evidence import LOW, RankEvidence, places, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.records import remedies
from stepscope.records.explanation import GAP_CAUSES, Finding


def find(evidence: RankEvidence) -> Finding | None:
    """Of the time the host leaves the device without work, more than half in no operator.

    host-bound tells how long the device has nothing queued; this tells that the time is in the
    user's own code, which fewer or larger kernels would not make shorter. On a CPU the two are the
    same, and host-bound alone speaks.
    """
    idle = evidence.idle
    if evidence.on_host or idle.python_ns <= idle.operators_ns:
        return None
    # The step of record has less host idle than the window, and no word on whose it was.
    host = evidence.budget_share("operators", "python")
    share = host * idle.python_ns / (idle.python_ns + idle.operators_ns)
    if share < LOW:
        return None
    return RULE.finding(
        share=share,
        severity=severity(share),
        summary=f"the {evidence.device} waits {share:.0%} of the step for Python code between "
        "operators.",
        evidence=(
            f"idle while the host was in Python outside operators: {evidence.step_ms(share)}",
            f"idle while it was inside operators: {evidence.step_ms(host - share)}",
        ),
        where=places(evidence, (GAP_CAUSES.index("python"),)),
        remedies=(
            remedies.COMPILE.offer("torch.compile takes Python out of the model's forward"),
            remedies.CUDA_GRAPHS.offer("a replayed graph runs no Python between kernels"),
        ),
    )


RULE = FindingRule(id="python-overhead", scope="rank", title="Python overhead", find=find)
