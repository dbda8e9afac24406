"""Lines that NCCL logs at WARN."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import NcclEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.nccl_groups import DIGITS, SHOWN, count_rest
from stepscope.records.explanation import Place
from stepscope.records.nccl import NcclLog, NcclWarning
from stepscope.text.words import counted


def find(evidence: NcclEvidence) -> Finding | None:
    """All warnings; those that differ only in numbers are one line."""
    logs = evidence.logs
    by_text: dict[str, list[tuple[NcclLog, NcclWarning]]] = {}
    for log in logs:
        for warning in log.warnings:
            by_text.setdefault(DIGITS.sub("#", warning.text), []).append((log, warning))
    if not by_text:
        return None
    kinds = sorted(by_text.values(), key=lambda same: -_count(same))
    failed = any(not c.complete and c.rank is not None for log in logs for c in log.communicators)
    total = sum(map(_count, kinds)) + sum(log.warnings_left_out for log in logs)
    return RULE.finding(
        share=0.0,
        severity="medium" if failed else "low",
        summary=f"NCCL logged {counted(total, 'warning')}"
        + (", and a communicator never finished its initialization." if failed else "."),
        evidence=(
            *(_describe(same) for same in kinds[:SHOWN]),
            *count_rest(len(kinds) - SHOWN, "other warning"),
        ),
        where=tuple(
            Place(file=log.path, line=warning.line)
            for log, warning in (same[0] for same in kinds[:SHOWN])
        ),
        remedies=(
            remedies.READ_NCCL_WARNINGS.offer(
                f"Read the first warning ({_place_of(*_first_of(logs))}): later ones often follow "
                "from it"
            ),
        ),
    )


def _count(same: list[tuple[NcclLog, NcclWarning]]) -> int:
    return sum(warning.count for _, warning in same)


def _describe(same: list[tuple[NcclLog, NcclWarning]]) -> str:
    log, warning = same[0]
    source = f" ({warning.source})" if warning.source else ""
    return f"{_count(same)} x {warning.text}{source}, first at {_place_of(log, warning)}"


def _first_of(logs: Sequence[NcclLog]) -> tuple[NcclLog, NcclWarning]:
    """Return the first warning of the first log that has one."""
    log = next(log for log in logs if log.warnings)
    return log, min(log.warnings, key=lambda warning: warning.line)


def _place_of(log: NcclLog, warning: NcclWarning) -> str:
    return f"{Path(log.path).name}:{warning.line}"


RULE = FindingRule(id="nccl-warnings", scope="nccl", title="NCCL warnings", find=find)
