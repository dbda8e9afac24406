"""Findings of a run at lines of one file, as the file is now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.records.line_costs import LineCost
from stepscope.ui.editor.follow import follow

if TYPE_CHECKING:
    from stepscope.ui.lsp.finding_note import FindingNote
    from stepscope.ui.lsp.measured_run import MeasuredRun


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingLine:
    """A finding at a line (from 1)."""

    finding: FindingNote
    line: int
    stale: bool  # the line or the program is another now


def findings_in(
    measured: MeasuredRun, file: Path, text: str, *, same_program: bool
) -> list[FindingLine]:
    """Those whose line is still there."""
    placed = [
        (finding, place.line)
        for finding in measured.findings
        for place in finding.places
        if Path(place.file) == file
    ]
    if not placed or str(file) not in measured.costs.texts:
        return []
    places = tuple(LineCost(file=str(file), line=line, function="") for _, line in placed)
    followed = follow(replace(measured.costs, lines=places), file, text).lines
    return [
        FindingLine(finding=finding, line=now.line, stale=now.state == "stale" or not same_program)
        for (finding, _), now in zip(placed, followed, strict=True)
        if now.line is not None
    ]
