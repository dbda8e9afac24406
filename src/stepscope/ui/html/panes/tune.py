"""What `stepscope tune` measured for this run's command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.ui.html.pane import Pane, ReportData
from stepscope.ui.html.tune import view_of_tune

if TYPE_CHECKING:
    from stepscope.ui.html.tune_view import TuneView


def tune_pane(report: ReportData) -> TuneView | None:
    return view_of_tune(report.tune) if report.tune is not None else None


PANE = Pane(id="tune", title="Tried", order=25, view=tune_pane)
