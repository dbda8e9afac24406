"""The way to Perfetto: the traces' paths."""

from __future__ import annotations

from stepscope.ui.html.pane import Pane

PANE = Pane(
    id="perfetto",
    title="",
    order=100,
    view=lambda report: [rank.path for rank in report.ranks] if report.is_timed else None,
)
