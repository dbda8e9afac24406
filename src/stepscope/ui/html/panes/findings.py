"""The findings, each with its evidence and what to do."""

from __future__ import annotations

from typing import Any

from stepscope.records.explanation import Remedy
from stepscope.ui.html.pane import Pane, ReportData

SEVERITIES = {"high": "High", "medium": "Medium", "low": "Low", "none": "Note"}


def finding_cards(report: ReportData) -> list[dict[str, Any]] | None:
    """A rank is named where the report is about several; a remedy comes with what it saves."""
    explanation = report.explanation
    names = {rank.rank: rank.called for rank in explanation.ranks}
    several = len(report.ranks) > 1
    return [
        {
            "finding": finding,
            "severity": SEVERITIES[finding.severity],
            "rank": ""
            if finding.rank is None or not several
            else names.get(finding.rank, f"rank {finding.rank}"),
            "remedies": [(remedy, *saving_words(remedy)) for remedy in finding.remedies],
        }
        for finding in explanation.findings
    ] or None


def saving_words(remedy: Remedy) -> tuple[str, str]:
    """What a remedy buys, and the interval. One that was tried has its measured steps instead."""
    if remedy.tried is not None:
        return remedy.tried.label, remedy.tried.words
    if remedy.gain is None:
        return "", ""
    gain, ends = remedy.gain.words()
    return gain, ends.strip("()")


PANE = Pane(id="findings", title="Findings", order=20, view=finding_cards)
