"""stepscope explain: where each training step's time went."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from stepscope.errors import StepscopeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.engines import Engine, EngineName
    from stepscope.explain.explain_file import Also
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.explanation import Explanation, RankExplanation
    from stepscope.ui.advice import Foresight
    from stepscope.ui.html.picture import RankPicture


# Each drawn rank adds up to half a megabyte to the report; the tables of all ranks are there.
_DRAWN_RANKS = 16


@click.command(name="explain", short_help="where each training step's time went")
@click.argument("paths", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option(
    "--full",
    is_flag=True,
    help="Print every table: ranks, collectives, all findings and changes tried, efficiency, "
    "memory, kernels, operators. Without it: one screen.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write an HTML report (timeline, flame graphs, tables) to this file. It needs no network.",
)
@click.option(
    "--no-cache",
    is_flag=True,
    help="Read the trace itself, not the copy kept from an earlier reading, and keep none.",
)
@click.option(
    "--top",
    default=8,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Rows in each table that --full prints.",
)
@click.option(
    "--engine",
    type=click.Choice(["pool", "ray", "torch"]),
    default="pool",
    show_default=True,
    help="Where the files are read: in processes here, on a Ray cluster, or by the ranks that "
    "torchrun started this command with.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="How many files to read at the same time (default: one per CPU core).",
)
@click.option(
    "--memory-limit",
    metavar="SIZE",
    help="Memory that the training may use on each device, such as 24GB, for the largest batch "
    "that fits (default: all the device has).",
)
def command(
    paths: tuple[str, ...],
    as_json: bool,
    full: bool,
    html: Path | None,
    no_cache: bool,
    top: int,
    engine: EngineName,
    workers: int | None,
    memory_limit: str | None,
) -> None:
    """Explain trace files, folders of traces or run folders.

    PATHS are PyTorch profiler traces (.json, .json.gz, .json.zst), Nsight Systems SQLite exports,
    CUDA memory snapshots, or folders that hold one per rank, here or behind a URL (s3://, gs://,
    ...). Nothing leaves this machine.
    """
    from stepscope.explain.engines import open_engine

    limit = _bytes(memory_limit) if memory_limit else None
    with open_engine(engine, workers) as chosen:
        if not chosen.leads:
            _explain_share(paths, cache=not no_cache, html=html, engine=chosen, memory_limit=limit)
            return
        explanation = explain_paths(
            paths,
            cache=not no_cache,
            html=html,
            quiet=as_json,
            engine=chosen,
            memory_limit=limit,
        )
    if as_json:
        from stepscope.ui.contract import explanation_json
        from stepscope.ui.json_text import write_json

        write_json(explanation_json(explanation))
        return
    if full:
        from stepscope.ui.terminal.explanation import print_explanation

        print_explanation(explanation, top=top, report=html)
        return
    from stepscope.ui.terminal.short import print_short

    if html:
        print_short(explanation, more="--full prints all tables", report=html)
    else:
        print_short(explanation)


def _bytes(memory_limit: str) -> int:
    from stepscope.ui.sizes import parse_size

    return parse_size(memory_limit, "--memory-limit")


def explain_paths(
    paths: Sequence[str | Path],
    *,
    cache: bool,
    html: Path | None,
    quiet: bool = False,
    engine: Engine | None = None,
    memory_limit: int | None = None,
) -> Explanation:
    """Read and explain with progress on stderr; write the report when one is asked for."""
    from stepscope.explain.explain_job import explain_also
    from stepscope.ui.terminal.progress import shown_progress

    if html and not html.absolute().parent.is_dir():
        raise UsageError(f"--html {html}: its folder does not exist")
    draw = _drawing(html)
    with shown_progress(quiet=quiet) as progress:
        explanation, pictures = explain_also(
            paths,
            cache=cache,
            progress=progress,
            also=draw,
            also_for=_DRAWN_RANKS,
            alone=partial(_look_ahead, draw=draw),
            engine=engine,
            memory_limit=memory_limit,
        )
        explanation, pictures, foresight = _advised(explanation, pictures, cache, html)
    if html:
        _write(explanation, pictures, foresight, html)
    return explanation


def _explain_share(
    paths: Sequence[str | Path],
    *,
    cache: bool,
    html: Path | None,
    engine: Engine,
    memory_limit: int | None,
) -> None:
    """What a process does that takes part in a job and does not lead it: never a word."""
    from stepscope.explain.explain_job import explain_share

    try:
        explain_share(
            paths,
            engine=engine,
            cache=cache,
            also=_drawing(html),
            also_for=_DRAWN_RANKS,
            memory_limit=memory_limit,
        )
    except StepscopeError as error:  # the one that leads says it
        sys.exit(error.exit_code)


def _drawing(html: Path | None) -> Also | None:
    if html is None:
        return None
    from stepscope.ui.html.picture import draw_rank

    return draw_rank


def _look_ahead(analysis: RankAnalysis, rank: RankExplanation, *, draw: Also | None) -> _Look:
    """Of a single rank, while its trace is here: its picture, and what changes would buy."""
    from stepscope.ui.advice import foresee

    picture = draw(analysis.trace, rank) if draw else None
    return _Look(picture, foresee(analysis, rank, draw=draw is not None))


class _Look(NamedTuple):
    picture: RankPicture | None
    foresight: Foresight


def _advised(
    explanation: Explanation, made: list[Any], cache: bool, html: Path | None
) -> tuple[Explanation, list[RankPicture], Foresight | None]:
    """The explanation with advice, the pictures, and what was foreseen."""
    from stepscope.ui.advice import advise, foresee_again

    if made and isinstance(made[0], _Look):
        look = made[0]
        pictures = [look.picture] if look.picture else []
        return advise(explanation, look.foresight), pictures, look.foresight
    foresight = foresee_again(explanation, cache=cache, draw=html is not None)
    return advise(explanation, foresight), made, foresight


def _write(
    explanation: Explanation,
    pictures: list[RankPicture],
    foresight: Foresight | None,
    html: Path,
) -> None:
    from stepscope.ui.html.report import write_report

    try:
        write_report(explanation, pictures, html, whatif=foresight.page if foresight else None)
    except OSError as error:
        raise UsageError(f"--html {html} could not be written: {error.strerror}") from None
