"""NCCL's lines at WARN."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.explain.nccl.evidence import DIGITS, SHOWN, more
from stepscope.records.explanation import Finding, Place, Remedy
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.nccl import NcclLog, NcclWarning


def warned(logs: Sequence[NcclLog]) -> Finding | None:
    """NCCL's lines at WARN, alike ones together."""
    alike: dict[str, list[tuple[NcclLog, NcclWarning]]] = {}
    for log in logs:
        for warning in log.warnings:
            alike.setdefault(DIGITS.sub("#", warning.text), []).append((log, warning))
    if not alike:
        return None
    kinds = sorted(alike.values(), key=lambda found: -sum(each.count for _, each in found))
    lines = []
    for found in kinds[:SHOWN]:
        log, warning = found[0]
        times = sum(each.count for _, each in found)
        source = f" ({warning.source})" if warning.source else ""
        at = f"{Path(log.path).name}:{warning.line}"
        lines.append(f"{times} x {warning.text}{source}, first at {at}")
    failed = any(not c.complete and c.rank is not None for log in logs for c in log.communicators)
    total = sum(each.count for found in kinds for _, each in found)
    total += sum(log.warnings_left_out for log in logs)
    return Finding(
        id="nccl-warnings",
        title="NCCL warnings",
        share=0.0,
        severity="medium" if failed else "low",
        summary=f"NCCL warned {counted(total, 'time')}"
        + (" and a communicator was never initialised." if failed else "."),
        evidence=(*lines, *more(len(kinds) - SHOWN, "other warning")),
        where=tuple(Place(file=f[0][0].path, line=f[0][1].line) for f in kinds[:SHOWN]),
        remedies=(
            Remedy(id="read", summary="read the first one: the later ones often follow from it"),
        ),
    )
