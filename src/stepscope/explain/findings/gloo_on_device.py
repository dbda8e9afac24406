"""Collectives of a device's tensors that gloo runs on the host while the device idles."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain import intervals
from stepscope.explain.findings.evidence import LOW, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.explain.work import rows_named
from stepscope.records import remedies
from stepscope.records.trace import HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.explain.findings.evidence import RankEvidence
    from stepscope.explain.intervals import Set
    from stepscope.records.explanation import Finding

_SPAN = re.compile(r"^gloo:")
# The library that moves data between devices of a kind, where there is one.
_INSTEAD = {"cuda": "nccl", "rocm": "nccl", "xpu": "xccl"}


def find(evidence: RankEvidence) -> Finding | None:
    """Device idle during gloo's spans that move the device's tensors."""
    library = _INSTEAD.get(evidence.trace.kind)
    if evidence.on_host or library is None:
        return None
    spans = _device_spans(evidence)
    gaps = evidence.gaps.start_ns, evidence.gaps.end_ns
    share = evidence.idle_share(intervals.length(intervals.intersect(spans, gaps)))
    if share < LOW:
        return None
    window = evidence.timeline.start_ns, evidence.timeline.start_ns + evidence.timeline.span_ns
    works = evidence.window_share(intervals.length(intervals.clip(spans, *window)))
    device = evidence.device
    return RULE.finding(
        title=f"gloo instead of {library.upper()}",
        share=share,
        severity=severity(share),
        summary=f"gloo exchanges the {device}'s tensors over the host; the {device} idles "
        f"{share:.0%} of the step meanwhile.",
        evidence=(
            f"the {device} idles while gloo works: {evidence.step_ms(share)}",
            f"gloo works for {works:.0%} of the recorded steps; each tensor is copied to the host "
            "and back",
            *(f"group {name}: backend {backend}" for name, backend in _backends(evidence).items()),
        ),
        remedies=(
            remedies.USE_NCCL.offer(
                f'init_process_group("{library}"): {library.upper()} moves tensors from '
                "device to device; keep gloo for tensors of the CPU",
            ),
        ),
    )


def _device_spans(evidence: RankEvidence) -> Set:
    """gloo's spans that launch copies, or all where the capture says that no group has another
    backend for the device."""
    trace, host = evidence.trace, evidence.trace.host
    named = rows_named(trace, host, host.kind <= HostKind.ANNOTATION, _SPAN.match)
    if not named.any():
        return intervals.union(host.start_ns[:0], host.start_ns[:0])
    if not _only_gloo(evidence):
        around = nearest_of(host, named, trace.device.launch)
        named = np.zeros(len(host), np.bool_)
        named[around[around >= 0]] = True
    return intervals.union(host.start_ns[named], (host.start_ns + host.dur_ns)[named])


def _only_gloo(evidence: RankEvidence) -> bool:
    """A model in DDP or FSDP on the device, whose gradients have no other way."""
    backends = [_for_device(text) for text in _backends(evidence).values()]
    spread = any(evidence.layout.get(name) for name in ("ddp", "fsdp_modules", "placements"))
    return spread and bool(backends) and all(name == "gloo" for name in backends)


def _backends(evidence: RankEvidence) -> dict[str, str]:
    """Group -> backend as torch says it, such as cpu:gloo,cuda:nccl."""
    groups = evidence.layout.get("groups") or ()
    return {str(each.get("name")): str(each.get("backend") or "") for each in groups}


def _for_device(backend: str) -> str:
    """The part that serves a device; one name serves all."""
    parts = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return next((name for kind, name in parts.items() if kind != "cpu"), backend)


RULE = FindingRule(id="gloo-on-device", scope="rank", title="gloo instead of NCCL", find=find)
