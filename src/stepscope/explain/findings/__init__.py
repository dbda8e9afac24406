"""What is worth knowing about a step, one file a finding; a finding's id is its file's name.

Each file has `find(evidence) -> Finding | None` and a page of the same name in docs/findings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings import (
    blocking_syncs,
    data_loading,
    denormals,
    dispatch_bound,
    dominant_kernel,
    exposed_communication,
    exposed_copies,
    fp32_matmuls,
    fragmentation,
    gloo_on_device,
    healthy,
    host_bound,
    launch_bound,
    layout_copies,
    memory_bound,
    memory_leak,
    memory_near_limit,
    optimizer_per_parameter,
    other_processes,
    profiler_overhead,
    python_overhead,
    recomputation,
    short_kernels,
    slow_products,
    small_batch,
    tensor_cores_idle,
    thread_oversubscription,
    too_few_threads,
)

if TYPE_CHECKING:
    from stepscope.explain.findings.evidence import Evidence
    from stepscope.records.explanation import Finding

_ALL = (
    thread_oversubscription,
    other_processes,
    too_few_threads,
    dispatch_bound,
    slow_products,
    denormals,
    launch_bound,
    host_bound,
    python_overhead,
    data_loading,
    blocking_syncs,
    exposed_communication,
    gloo_on_device,
    exposed_copies,
    profiler_overhead,
    short_kernels,
    dominant_kernel,
    fp32_matmuls,
    tensor_cores_idle,
    memory_bound,
    layout_copies,
    small_batch,
    optimizer_per_parameter,
    recomputation,
    memory_near_limit,
    fragmentation,
    memory_leak,
)
_RANK = {"high": 0, "medium": 1, "low": 2, "none": 3}


def find_all(evidence: Evidence) -> tuple[Finding, ...]:
    """The gravest first; `healthy` alone when nothing grave was found."""
    found = [finding for module in _ALL if (finding := module.find(evidence))]
    found.sort(key=lambda finding: (_RANK[finding.severity], -finding.share))
    if not any(finding.severity in ("high", "medium") for finding in found):
        found.insert(0, healthy.find(evidence))
    return tuple(found)
