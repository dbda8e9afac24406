"""The verdict, why, and what to do next: the first words of the page."""

from __future__ import annotations

from stepscope.ui.html.pane import Pane

PANE = Pane(id="verdict", title="Verdict", order=10, view=lambda report: report.explanation)
