"""The report: one HTML file that opens anywhere, with no network. It draws; it never computes.

`draw_rank` takes what the page needs out of a trace while the trace is still in memory (it runs in
the worker that read it); `write_report` turns explanations and pictures into the file.
"""

from __future__ import annotations

from stepscope.ui.html.picture import RankPicture, draw_rank
from stepscope.ui.html.report import write_report

__all__ = ["RankPicture", "draw_rank", "write_report"]
