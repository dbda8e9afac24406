"""stepscope sweep: train a model with many settings, several models at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import UsageError
from stepscope.ui.cli.options import complete_file, json_option, out_option
from stepscope.ui.cli.verb_command import VerbCommand
from stepscope.ui.run_folder import claim_or_refuse
from stepscope.ui.say import say

if TYPE_CHECKING:
    from stepscope.ui.sweep.journal import SweepJournal


@click.command(
    cls=VerbCommand,
    name="sweep",
    examples=(
        (
            "stepscope sweep train.py --grid lr=1e-3,3e-4 wd=0,0.1",
            "Train four settings, several models at a time",
        ),
        (
            "stepscope sweep train.py --grid lr=1e-3,3e-4 --fuse auto --steps 1000",
            "Train as many models together as fit into memory",
        ),
    ),
    option_groups=(
        ("What to train", ("--grid", "--fuse", "--steps", "--seed", "--resume")),
        ("Output", ("--every", "--out", "--json", "--quiet")),
    ),
)
@click.argument("script", shell_complete=complete_file)
@click.argument("more", nargs=-1, metavar="[NAME=VALUE,VALUE]...")
@click.option(
    "--grid",
    multiple=True,
    metavar="NAME=VALUE,VALUE",
    help="Settings to try, in every combination. More of them may follow as plain words.",
)
@click.option(
    "--fuse",
    default="8",
    show_default=True,
    metavar="N|auto",
    help="Models to train together. auto takes as many as fit into memory.",
)
@click.option(
    "--steps",
    default=500,
    show_default=True,
    type=click.IntRange(1),
    help="Steps that each trial trains.",
)
@click.option(
    "--every",
    default=50,
    show_default=True,
    type=click.IntRange(1),
    help="Steps between two reports of each trial's loss.",
)
@click.option("--seed", default=0, show_default=True, help="Every trial starts from this seed.")
@click.option(
    "--resume",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Resume the sweep in this folder with its own options.",
)
@out_option("Folder for the results (default: stepscope-runs/<time>-<script>).")
@json_option
@click.option("--quiet", is_flag=True, help="Print nothing while trials train.")
def command(
    script: str,
    more: tuple[str, ...],
    grid: tuple[str, ...],
    resume: Path | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Train a model with every setting of a grid, several models at a time.

    SCRIPT defines build(config). Models of one architecture train together in one process, and each
    trains as it would alone.
    """
    from stepscope.ui.sweep.running import run_sweep
    from stepscope.ui.sweep.table import shown_sweep

    words = (*grid, *more)
    journal = _resume(script, words, resume) if resume else _begin(script, words, out, options)
    code = 0
    if not quiet:
        say(f"sweep folder {journal.folder}")
    with shown_sweep(journal.start.steps, quiet=quiet) as shown:
        try:
            run_sweep(journal, shown)
        except KeyboardInterrupt:
            code = 130
    _print(journal, as_json=as_json)
    return code


def _begin(
    script: str, words: tuple[str, ...], out: Path | None, options: dict[str, Any]
) -> SweepJournal:
    from stepscope.ui.sweep.axes import parse_axes
    from stepscope.ui.sweep.journal import SweepJournal, SweepStart

    axes = parse_axes(words)
    if not axes:
        raise UsageError("name the settings to try: --grid lr=1e-3,3e-4 wd=0,0.1")
    if not Path(script).is_file():
        raise UsageError(f"{script} does not exist")
    start = SweepStart(
        script=str(Path(script).absolute()),
        grid={name: list(values) for name, values in axes.items()},
        fuse=_parse_fuse(options.pop("fuse")),
        **options,
    )
    return SweepJournal.create(claim_or_refuse(out, (script,)), start)


def _parse_fuse(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--fuse {text}: write a number of models, or auto")
    return int(text)


def _resume(script: str, words: tuple[str, ...], folder: Path) -> SweepJournal:
    from stepscope.ui.sweep.axes import parse_axes
    from stepscope.ui.sweep.journal import SweepJournal

    journal = SweepJournal.read(folder)
    if str(Path(script).absolute()) != journal.start.script:
        raise UsageError(f"{folder} is a sweep of {journal.start.script}, not of {script}")
    asked = {name: list(values) for name, values in parse_axes(words).items()}
    if asked and asked != journal.start.grid:
        raise UsageError(f"{folder} has another grid: leave out --grid to resume it")
    return journal


def _print(journal: SweepJournal, *, as_json: bool) -> None:
    from stepscope.ui.sweep.words import sweep_json, sweep_text

    click.echo(sweep_json(journal) if as_json else sweep_text(journal))
