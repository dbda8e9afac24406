"""The report: the panes that have something to show, and each rank's data, in one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from stepscope.records.explanation import Explanation, RankExplanation
from stepscope.ui.html.pane import ReportData, encode_rank, rank_label
from stepscope.ui.html.panes import find_panes
from stepscope.ui.html.panes.tables import rank_tables
from stepscope.ui.html.render import has_page_file, render_page, render_part, write_atomically

if TYPE_CHECKING:
    from stepscope.trace.run_folder.related_runs import FoundTune
    from stepscope.ui.html.pane import Pane
    from stepscope.ui.html.picture import RankPicture
    from stepscope.ui.html.whatif_grid import WhatIfGrid

MOST_RANKS = 64  # whose facts, tables and timelines are in the page


def write_report(
    explanation: Explanation,
    pictures: Sequence[RankPicture],
    path: Path,
    *,
    whatif: WhatIfGrid | None = None,
    tune: FoundTune | None = None,
) -> None:
    """Pictures are matched to ranks by their trace's path; a rank without one keeps its tables."""
    drawn = {picture.path: picture for picture in pictures}
    ranks = ranks_in_detail(explanation, set(drawn))
    report = ReportData(explanation=explanation, ranks=ranks, whatif=whatif, tune=tune)
    payloads = [encode_rank(drawn.get(rank.path), rank_tables(rank)) for rank in ranks]
    write_atomically(path, _render(report, payloads))


def _render(report: ReportData, payloads: list[str]) -> str:
    views = [(pane, pane.view(report)) for pane in find_panes()]
    shown = [(pane, view) for pane, view in views if view is not None]
    names = [pane.id for pane, _ in shown]
    styles = [f"{name}.css" for name in names if has_page_file(f"{name}.css")]
    scripts = [name for name in names if has_page_file(f"{name}.js")]
    return render_page(
        "report.html.j2",
        styles=["report.css", *styles],
        scripts=[*scripts, "main"],
        title=report.explanation.verdict,
        links=[(pane.id, pane.title) for pane, _ in shown if pane.title],
        picker=[
            (rank.rank, rank_label(rank), rank.budget.step_ms)
            for rank in report.ranks
            if len(report.ranks) > 1
        ],
        panes=[_section(pane, view, report) for pane, view in shown],
        payloads=payloads,
    )


def _section(pane: Pane, view: object, report: ReportData) -> Markup:
    return render_part(f"{pane.id}.html.j2", view=view, report=report, alone=False)


def ranks_in_detail(explanation: Explanation, drawn: set[str]) -> list[RankExplanation]:
    """With too many ranks, those worth a look: drawn, accused, on the path, slowest, fastest."""
    if len(explanation.ranks) <= MOST_RANKS:
        return list(explanation.ranks)
    job = explanation.job
    wanted = [rank.rank for rank in explanation.ranks if rank.path in drawn]
    wanted += [finding.rank for finding in explanation.findings]
    if job is not None:
        wanted += [straggler.rank for straggler in job.stragglers.ranks]
        wanted += job.lanes.ranks if job.lanes else []
        wanted += list(job.path.share_by_rank) if job.path else []
        own = np.array([times.own_ms for times in job.times])
        slowest_first = [job.ranks[i] for i in np.argsort(-own, kind="stable").tolist()]
        wanted += slowest_first[:16] + slowest_first[-16:]
    wanted += [rank.rank for rank in explanation.ranks]
    known = dict.fromkeys(rank for rank in wanted if rank is not None)
    chosen = set(list(known)[:MOST_RANKS])
    return [rank for rank in explanation.ranks if rank.rank in chosen]
