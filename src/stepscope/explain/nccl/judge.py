"""All findings about the ways the ranks talk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.nccl.channels import unequal_channels
from stepscope.explain.nccl.groups import groups_of
from stepscope.explain.nccl.transports import no_p2p, socket_fallback
from stepscope.explain.nccl.warnings import warned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.explanation import Finding
    from stepscope.records.nccl import NcclLog

FINDINGS = ("nccl-socket-fallback", "nccl-unequal-channels", "nccl-no-p2p", "nccl-warnings")


def judge_nccl(logs: Sequence[NcclLog]) -> tuple[Finding, ...]:
    """What is odd about the ways the ranks talk, the gravest first."""
    groups = groups_of(logs)
    found = [
        finding
        for judge in (socket_fallback, unequal_channels, no_p2p)
        if (finding := judge(logs, groups))
    ]
    if warnings := warned(logs):
        found.append(warnings)
    order = ("high", "medium", "low", "none")
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))
