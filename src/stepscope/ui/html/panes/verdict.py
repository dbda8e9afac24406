"""The verdict, why, what to do next, and what the run was started with: the page's first words."""

from __future__ import annotations

from stepscope.records.explanation import Explanation
from stepscope.ui.html.pane import Pane, ReportData
from stepscope.ui.words import applied_line, failed_line


def first_words(report: ReportData) -> tuple[Explanation, str, str]:
    explanation = report.explanation
    return explanation, applied_line(explanation.origin), failed_line(explanation)


PANE = Pane(id="verdict", title="Verdict", order=10, view=first_words)
