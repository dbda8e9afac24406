"""The tune's own page: report.html in its folder, and the section in the report of its baseline."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from stepscope.errors import NotCapturedError
from stepscope.trace.tune_files import FoundTune, read_tune
from stepscope.ui.html.render import render_page, render_part, write_atomically
from stepscope.ui.html.tune_view import make_view

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.tuning import TuneResult
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
        raise NotCapturedError(f"{folder} has no measured baseline: there is nothing to draw")
    page = render_page(
        "tune_page.html.j2",
        styles=STYLES,
        scripts=["tune_page"],
        title=view.verdict,
        links=[("tune", "Trials")],
        command=shlex.join(tune.result.command),
        section=render_part("tune.html.j2", view=view, alone=True),
        view=view,
    )
    target = path or folder / REPORT
    write_atomically(target, page)
    return target


def view_of_tune(tune: FoundTune) -> TuneView | None:
    return make_view(tune.result, run_with=run_with_command(tune.result))


def run_with_command(result: TuneResult) -> str:
    """The whole training with what was kept."""
    if not result.kept or not result.command:
        return ""
    return f"stepscope run --with {','.join(result.kept)} -- {shlex.join(result.command)}"
