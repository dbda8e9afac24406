"""The device waits for Python itself: code between operators, not the operators."""

from __future__ import annotations

from stepscope.explain.findings.evidence import LOW, Evidence, places, severity
from stepscope.records.explanation import GAP_CAUSES, Finding, Remedy


def find(evidence: Evidence) -> Finding | None:
    """Of the time the host leaves the device without work, more than half in no operator.

    host-bound tells how long the device has nothing queued; this tells that the time is in the
    user's own code, which fewer or larger kernels would not make shorter. On a CPU the two are the
    same, and host-bound alone speaks.
    """
    idle = evidence.idle
    if evidence.on_host or idle.python_ns <= idle.operators_ns:
        return None
    # The step of record has less host idle than the window, and no word on whose it was.
    host = evidence.part("operators", "python")
    share = host * idle.python_ns / (idle.python_ns + idle.operators_ns)
    if share < LOW:
        return None
    return Finding(
        id="python-overhead",
        title="Python overhead",
        share=share,
        severity=severity(share),
        summary=f"the {evidence.device} waits {share:.0%} of the step for Python code between "
        "operators.",
        evidence=(
            f"idle while the host was in Python outside operators: {evidence.ms(share)}",
            f"idle while it was inside operators: {evidence.ms(host - share)}",
        ),
        where=places(evidence, (GAP_CAUSES.index("python"),)),
        remedies=(
            Remedy(id="compile", summary="torch.compile takes Python out of the model's forward"),
            Remedy(id="cuda-graphs", summary="a replayed graph runs no Python between kernels"),
        ),
    )
