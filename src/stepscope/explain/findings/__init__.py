"""What is worth knowing about a step: one function per finding, in files by subject.

A finding's id is its function's name with dashes, and that of its page in docs/findings. What
findings look at, and how they declare themselves, is in evidence.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.changes import BATCH, COMPILE, CUDA_GRAPHS, REDUCE_OVERHEAD
from stepscope.records.explanation import SEVERITIES, Finding
from stepscope.records.parameter_server import TogetherSummary

if TYPE_CHECKING:
    from stepscope.explain.findings.evidence import FindingRule, JobEvidence, RankEvidence, Scope
    from stepscope.explain.findings.nccl import NcclEvidence

# By scope, imported when that scope is asked for. Of two findings that are equally severe and have
# the same share, the earlier one leads.
FINDINGS: dict[Scope, tuple[str, ...]] = {
    "rank": (
        "threads.thread_oversubscription",
        "threads.other_processes",
        "threads.too_few_threads",
        "threads.dispatch_bound",
        "matmuls.slow_products",
        "threads.denormals",
        "host.launch_bound",
        "host.host_bound",
        "host.python_overhead",
        "loop.data_stalls",
        "loop.data_loading",
        "compiled.graph_breaks",
        "compiled.recompiles",
        "compiled.graphs_skipped",
        "compiled.not_fused",
        "kernels.below_roof",
        "memory.allocator_retries",
        "host.gc_pauses",
        "loop.periodic_stall",
        "loop.irregular_stalls",
        "loop.slows_down",
        "host.blocking_syncs",
        "communication.exchange_every_pass",
        "communication.exposed_communication",
        "communication.gloo_on_device",
        "kernels.exposed_copies",
        "host.profiler_overhead",
        "kernels.short_kernels",
        "kernels.dominant_kernel",
        "matmuls.fp32_matmuls",
        "matmuls.tensor_cores_idle",
        "kernels.memory_bound",
        "kernels.layout_copies",
        "kernels.small_batch",
        "kernels.optimizer_per_parameter",
        "recurrence.long_recurrence",
        "memory.recomputation",
        "memory.memory_near_limit",
        "memory.fragmentation",
        "memory.memory_growth",
        "memory.memory_leak",
        "loop.evaluation_share",
        "loop.checkpoint_share",
        "compiled.compile_time",
        "loop.start_up",
        "host.one_of_many",
        "healthy.unknown_work",
        "healthy.healthy",
    ),
    "job": (
        "jobs.not_training_together",
        "jobs.straggler",
        "jobs.pipeline_bubble",
    ),
    "together": (
        "parameter_server.server_bound",
        "parameter_server.barrier_waits",
        "parameter_server.staleness_does_not_pay",
    ),
    "nccl": (
        "nccl.nccl_socket_fallback",
        "nccl.nccl_unequal_channels",
        "nccl.nccl_no_p2p",
        "nccl.nccl_warnings",
    ),
}

HEALTHY, UNKNOWN = "healthy", "unknown-work"
NO_LOSS = (HEALTHY, UNKNOWN)  # verdicts of a step in which nothing was found
OTHERS = "other-processes"  # high: all that is said was measured beside them
BESIDE_OTHERS = "measured while other processes used the cores, which makes it longer"


def load_rules(scope: Scope) -> list[FindingRule]:
    """The rules of one scope, in the order of the list above."""
    places = (name.partition(".") for name in FINDINGS[scope])
    return [getattr(import_module(f"{__name__}.{file}"), name) for file, _, name in places]


def find_in_rank(evidence: RankEvidence) -> tuple[Finding, ...]:
    """Findings about one rank's step."""
    findings = apply_rules("rank", evidence)
    pointless = _list_pointless(evidence)
    if any(map(leads_all, findings)):
        # How long a larger batch takes on cores of one's own cannot be told from these times.
        pointless = {*pointless, BATCH.id}
        findings = [_beside_others(finding) for finding in findings]
    return sort_findings(_without(finding, pointless) for finding in findings)


def leads_all(finding: Finding) -> bool:
    """Other programs take so many cores that every time of the step is doubtful."""
    return finding.id == OTHERS and finding.severity == "high"


def _beside_others(finding: Finding) -> Finding:
    if finding.id == OTHERS:
        return finding
    return replace(finding, evidence=(*finding.evidence, BESIDE_OTHERS))


def _list_pointless(evidence: RankEvidence) -> set[str]:
    """Remedies that the step shows already, or that need one that it does not show. A graph replays
    whatever was compiled into it."""
    graphed = {CUDA_GRAPHS.id, REDUCE_OVERHEAD.id} if evidence.is_graphed else set()
    return graphed | {COMPILE.id if evidence.is_compiled else REDUCE_OVERHEAD.id}


def _without(finding: Finding, pointless: set[str]) -> Finding:
    others = tuple(remedy for remedy in finding.remedies if remedy.id not in pointless)
    return replace(finding, remedies=others)


def apply_rules(
    scope: Scope, evidence: RankEvidence | JobEvidence | NcclEvidence | TogetherSummary
) -> list[Finding]:
    """Return what the rules of one scope find in its evidence."""
    return [finding for rule in load_rules(scope) if (finding := rule.find(evidence))]


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Most severe first, then the largest share. `healthy`, or `unknown-work` in its place, leads
    when nothing needs attention and is left out otherwise.

    Other programs that take many cores come before everything else: all of it was measured beside
    them. A share of the training loop and one of the mean step have other wholes. So a share of the
    step counts for what it is of the loop: steps take what evaluation and checkpoints leave.
    """
    every = tuple(findings)
    beside = (
        f.share for f in every if f.of == "run" and f.id in ("evaluation-share", "checkpoint-share")
    )
    training = max(0.0, 1 - sum(beside))

    def rank(finding: Finding) -> tuple[bool, int, bool, float]:
        share = finding.share * (training if finding.of == "step" else 1.0)
        by_severity = SEVERITIES.index(finding.severity)
        return not leads_all(finding), by_severity, finding.of != "work", -share

    in_order = sorted(every, key=rank)
    if any(finding.severity in ("high", "medium") for finding in in_order):
        return tuple(finding for finding in in_order if finding.id not in NO_LOSS)
    if any(finding.id == UNKNOWN for finding in in_order):  # on one rank: not all are healthy
        in_order = [finding for finding in in_order if finding.id != HEALTHY]
    return tuple(sorted(in_order, key=lambda finding: finding.id not in NO_LOSS))
