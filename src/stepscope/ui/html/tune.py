"""The tune's own page: report.html in its folder, and the section in the report of its baseline."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from stepscope.errors import NotCapturedError
from stepscope.trace.tune_files import FoundTune, read_tune
from stepscope.ui.html.loss_charts import loss_curves
from stepscope.ui.html.render import render_page, render_part, write_atomically
from stepscope.ui.html.tune_view import make_view
from stepscope.ui.tune_words import run_command, tune_answer

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.ui.html.tune_view import TuneView

REPORT = "report.html"
STYLES = ("report.css", "tune.css")


def write_tune_report(folder: Path, path: Path | None = None) -> Path:
    """From the folder's tune.json; returns where the page is.

    UnreadableInputError if there is no tune.json, NotCapturedError if it has no baseline.
    """
    tune = FoundTune(folder, read_tune(folder))
    view = view_of_tune(tune)
    if view is None:
        raise NotCapturedError(f"{folder} has no measured baseline, so there is nothing to draw")
    page = render_page(
        "tune_page.html.j2",
        styles=STYLES,
        scripts=["tune_page"],
        title=view.answer.verdict,
        links=[("tune", "Trials")],
        command=shlex.join(tune.result.command),
        section=render_part("tune.html.j2", view=view, alone=True),
        view=view,
    )
    target = path or folder / REPORT
    write_atomically(target, page)
    return target


def view_of_tune(tune: FoundTune) -> TuneView | None:
    """None where not even the baseline was measured."""
    result = tune.result
    if result.baseline_ms is None:
        return None
    return make_view(
        result,
        tune_answer(result, tune.folder),
        run_with=run_command(result) if result.kept and result.command else "",
        curves=loss_curves(tune.folder, result),
    )
