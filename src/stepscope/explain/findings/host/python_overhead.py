"""The device waits for Python code between operators."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, RankEvidence, places
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.explanation import GAP_CAUSES
from stepscope.text.figures import percent


def find(evidence: RankEvidence) -> Finding | None:
    """More than half of the time without work is Python outside operators.

    host-bound reports how long the device has nothing queued. This reports that the user's own code
    is the reason, which fewer or larger kernels do not make shorter. On a CPU the two are the same,
    and only host-bound is reported.
    """
    idle = evidence.idle
    if evidence.on_host or idle.python_ns <= idle.operators_ns:
        return None
    # The step of record has less idle time than the window; its causes are known for the window.
    host = evidence.budget_share("operators", "python")
    share = host * idle.python_ns / (idle.python_ns + idle.operators_ns)
    if share < LOW:
        return None
    return RULE.finding(
        share=share,
        summary=f"The {evidence.device} waits {percent(share)} of the step for Python code that "
        "runs between operators.",
        evidence=(
            f"idle while Python runs between operators: {evidence.step_ms(share)}",
            f"idle while the CPU is inside operators: {evidence.step_ms(host - share)}",
        ),
        where=places(evidence, (GAP_CAUSES.index("python"),)),
        remedies=(
            remedies.COMPILE.offer(
                "Call torch.compile(model): it removes Python from the model's forward pass"
            ),
            remedies.CUDA_GRAPHS.offer(
                "Capture the step with torch.cuda.graph(): no Python runs between kernels"
            ),
        ),
    )


RULE = FindingRule(id="python-overhead", title="Python overhead", find=find)
