"""Collectives on device tensors that gloo runs on the host while the device idles."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.trace import HostKind
from stepscope.step import intervals
from stepscope.step.work import rows_named, spans_of
from stepscope.text.figures import percent
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.step.intervals import Set

_SPAN = re.compile(r"^gloo:")
# The library that moves data between devices, by kind of device.
_INSTEAD = {"cuda": "nccl", "rocm": "nccl", "xpu": "xccl"}


def find(evidence: RankEvidence) -> Finding | None:
    """Idle time of the device while gloo moves its tensors."""
    library = _INSTEAD.get(evidence.trace.kind)
    if evidence.on_host or library is None:
        return None
    spans = _select_device_spans(evidence)
    gaps = evidence.gaps.start_ns, evidence.gaps.end_ns
    share = evidence.idle_share(intervals.length(intervals.intersect(spans, gaps)))
    if share < LOW:
        return None
    window = evidence.timeline.start_ns, evidence.timeline.start_ns + evidence.timeline.span_ns
    works = evidence.window_share(intervals.length(intervals.clip(spans, *window)))
    device = evidence.device
    return RULE.finding(
        title="" if library == "nccl" else f"gloo instead of {library.upper()}",
        share=share,
        summary=f"The {device} is idle {percent(share)} of the step while gloo exchanges its "
        "tensors through the CPU.",
        evidence=(
            f"idle while gloo works: {evidence.step_ms(share)}",
            f"gloo works for {percent(works)} of the recorded steps: it copies each tensor to the "
            "CPU and back",
            *(
                f"group {name}: backend {backend}"
                for name, backend in _read_backends(evidence).items()
            ),
        ),
        remedies=(
            remedies.USE_NCCL.offer(
                f'Call init_process_group("{library}"): {library.upper()} moves tensors directly '
                "between devices. Keep gloo for CPU tensors"
            ),
        ),
    )


def _select_device_spans(evidence: RankEvidence) -> Set:
    """gloo's spans that launch copies; all of them where the capture shows that no group has
    another backend for the device."""
    trace, host = evidence.trace, evidence.trace.host
    named = rows_named(trace, host, host.kind <= HostKind.ANNOTATION, _SPAN.match)
    if named.any() and not _has_only_gloo(evidence):
        around = nearest_of(host, named, trace.device.launch)
        named = np.zeros(len(host), np.bool_)
        named[around[around >= 0]] = True
    return spans_of(host, named)


def _has_only_gloo(evidence: RankEvidence) -> bool:
    """Whether a model in DDP or FSDP has no other backend for its gradients."""
    backends = [_device_backend(text) for text in _read_backends(evidence).values()]
    spread = any(evidence.layout.get(name) for name in ("ddp", "fsdp_modules", "placements"))
    return spread and bool(backends) and all(name == "gloo" for name in backends)


def _read_backends(evidence: RankEvidence) -> dict[str, str]:
    """Group -> backend in torch's words, such as cpu:gloo,cuda:nccl."""
    groups = evidence.layout.get("groups") or ()
    return {str(row.get("name")): str(row.get("backend") or "") for row in groups}


def _device_backend(backend: str) -> str:
    """The backend for the device; a single name is for all devices."""
    parts = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return next((name for kind, name in parts.items() if kind != "cpu"), backend)


RULE = FindingRule(id="gloo-on-device", title="gloo instead of NCCL", find=find)
