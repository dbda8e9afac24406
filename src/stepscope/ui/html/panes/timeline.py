"""The timeline of one rank; timeline.js draws it from the rank's data block."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.ui.html.classes import LEGEND
from stepscope.ui.html.pane import Pane, ReportData
from stepscope.ui.html.parts import gap_labels


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineView:
    """What the template prints."""

    events: dict[str, str]  # colour and label
    causes: dict[str, str]  # of idle time
    shown: int
    all_ranks: int


def timeline_view(report: ReportData) -> TimelineView | None:
    if not report.is_timed:
        return None
    return TimelineView(
        events=LEGEND,
        causes={cause: label for cause, label in gap_labels().items() if cause != "host"},
        shown=len(report.ranks),
        all_ranks=len(report.explanation.ranks),
    )


PANE = Pane(id="timeline", title="Timeline", order=70, view=timeline_view)
