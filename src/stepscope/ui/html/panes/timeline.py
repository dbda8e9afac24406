"""The timeline of one rank; timeline.js draws it from the rank's data block."""

from __future__ import annotations

from typing import Any

from stepscope.ui.html.pane import Pane, ReportData
from stepscope.ui.html.render import LEGEND, gap_labels


def timeline_view(report: ReportData) -> dict[str, Any] | None:
    if not report.is_timed:
        return None
    return {
        "events": LEGEND,
        "causes": {cause: label for cause, label in gap_labels().items() if cause != "host"},
        "shown": len(report.ranks),
        "all_ranks": len(report.explanation.ranks),
    }


PANE = Pane(id="timeline", title="Timeline", order=70, view=timeline_view)
