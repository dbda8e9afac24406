"""Flame graphs of one rank's host and device; flames.js draws them from the rank's data block."""

from __future__ import annotations

from stepscope.ui.html.pane import Pane

# id, title, what its stacks are
SIDES = (
    ("device", "Device time", "by the operator that launched it"),
    ("host", "CPU time", "by call stack; includes the profiler's own slow-down"),
)

PANE = Pane(
    id="flames",
    title="Flame graphs",
    order=80,
    view=lambda report: SIDES if report.is_timed else None,
)
