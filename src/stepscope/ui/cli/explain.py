"""stepscope explain: where each training step's time went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.records.explanation import Explanation


# Each drawn rank adds up to half a megabyte to the report; the tables of all ranks are there.
_DRAWN_RANKS = 16


@click.command(name="explain", short_help="where each training step's time went")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a report to this file."
)
@click.option("--no-cache", is_flag=True, help="Neither use nor write the cache.")
@click.option(
    "--top", default=8, show_default=True, type=click.IntRange(1, 100), help="Rows per table."
)
def command(
    paths: tuple[Path, ...], as_json: bool, html: Path | None, no_cache: bool, top: int
) -> None:
    """Explain trace files, folders of traces or run folders.

    PATHS are PyTorch profiler traces (.json, .json.gz, .json.zst), Nsight Systems SQLite exports,
    or folders that hold one per rank. Nothing leaves this machine.
    """
    explanation = explain_paths(paths, cache=not no_cache, html=html, quiet=as_json)
    if as_json:
        import msgspec

        from stepscope.ui.contract import explanation_json

        sys.stdout.write(msgspec.json.encode(explanation_json(explanation)).decode() + "\n")
        return
    from stepscope.ui.terminal.explanation import print_explanation

    print_explanation(explanation, top=top, report=html)


def explain_paths(
    paths: tuple[Path, ...], *, cache: bool, html: Path | None, quiet: bool = False
) -> Explanation:
    """Read and explain with progress on stderr; write the report when one is asked for."""
    from stepscope.explain.run import explain_also
    from stepscope.ui.terminal.progress import shown_progress

    if html is None:
        with shown_progress(quiet=quiet) as progress:
            return explain_also(paths, cache=cache, progress=progress)[0]
    if not html.absolute().parent.is_dir():
        raise UsageError(f"--html {html}: its folder does not exist")
    from stepscope.ui.html.picture import draw_rank
    from stepscope.ui.html.report import write_report

    with shown_progress(quiet=quiet) as progress:
        explanation, pictures = explain_also(paths, cache=cache, progress=progress, also=draw_rank)
    try:
        write_report(explanation, pictures[:_DRAWN_RANKS], html)
    except OSError as error:
        raise UsageError(f"--html {html} could not be written: {error.strerror}") from None
    return explanation
