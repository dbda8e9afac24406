"""stepscope explain: where each training step's time went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepscope.errors import StepscopeError, UsageError
from stepscope.ui.cli.options import (
    check_html,
    check_perfetto,
    html_option,
    json_option,
    no_cache_option,
    top_option,
    writing_html,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.engines import Engine
    from stepscope.explain.explain_job import JobTraces
    from stepscope.explain.open_engine import EngineName
    from stepscope.records.explanation import Explanation
    from stepscope.trace.tune_files import FoundTune
    from stepscope.ui.advice import RankAdvice
    from stepscope.ui.rank_look import RankLook


@click.command(name="explain")
@click.argument("paths", nargs=-1, required=True)
@json_option
@click.option(
    "--full",
    is_flag=True,
    help="Print every table: ranks, collectives, all findings and changes tried, efficiency, "
    "memory, kernels, operators. Without it: one screen.",
)
@html_option(
    "Write an HTML report (timeline, flame graphs, tables) to this file. It needs no network."
)
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the trace with our tracks (budget, idle causes, critical path, findings) for "
    "ui.perfetto.dev; compressed if FILE ends with .gz. Several ranks get a file each.",
)
@no_cache_option
@top_option(8, 100, "Rows in each table that --full prints.")
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
    perfetto: Path | None,
    no_cache: bool,
    top: int,
    engine: EngineName,
    workers: int | None,
    memory_limit: str | None,
) -> None:
    """Explain trace files, folders of traces, run folders, or the baseline of a tune folder.

    PATHS are PyTorch profiler traces (.json, .json.gz, .json.zst), Nsight Systems SQLite exports,
    CUDA memory snapshots, or folders that hold one per rank, here or behind a URL (s3://, gs://,
    ...). Nothing leaves this machine.
    """
    from stepscope.explain.open_engine import open_engine
    from stepscope.ui.sizes import parse_size

    limit = parse_size(memory_limit, "--memory-limit") if memory_limit else None
    with open_engine(engine, workers) as chosen:
        if not chosen.leads:
            _take_part(paths, cache=not no_cache, html=html, engine=chosen, memory_limit=limit)
            return
        try:
            explanation = explain_paths(
                paths,
                cache=not no_cache,
                html=html,
                perfetto=perfetto,
                quiet=as_json,
                engine=chosen,
                memory_limit=limit,
            )
        except UsageError as error:
            if html or perfetto:
                raise
            _answer_several(error, paths, cache=not no_cache, as_json=as_json)
            return
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

    more = "--full prints all tables" + ("" if html else "; --html FILE a report")
    print_short(explanation, more=more, report=html, memory_limit=limit)


def _answer_several(error: UsageError, paths: Sequence[str], *, cache: bool, as_json: bool) -> None:
    """A line for each job, if the error says that there are several; else the error again."""
    from stepscope.ui.several_jobs import explain_apart, several_json

    several = explain_apart(error, paths, cache=cache)
    if as_json:
        from stepscope.ui.json_text import write_json

        write_json(several_json(several))
        return
    from stepscope.ui.terminal.several_jobs import print_several

    print_several(several)


def explain_paths(
    paths: Sequence[str | Path],
    *,
    cache: bool,
    html: Path | None,
    perfetto: Path | None = None,
    quiet: bool = False,
    engine: Engine | None = None,
    memory_limit: int | None = None,
) -> Explanation:
    """Read, explain and advise, with progress on stderr; write the report when asked for one."""
    from stepscope.explain.explain_job import JobTraces
    from stepscope.trace.tune_files import traced_run
    from stepscope.ui.advice import add_advice, advise_slowest
    from stepscope.ui.rank_look import DRAWN_RANKS, choose_look
    from stepscope.ui.terminal.progress import shown_progress
    from stepscope.ui.tried_remedies import (
        add_origin,
        add_trials,
        next_by_tune,
        tried_alone,
        tune_of,
    )

    check_html(html)
    check_perfetto(perfetto)
    paths = [traced_run(path) for path in paths]
    draw = html is not None
    with shown_progress(quiet=quiet) as progress:
        traces = JobTraces(paths, cache=cache, memory_limit=memory_limit, engine=engine)
        look = choose_look(traces, draw=draw)
        explanation, looks = traces.explain(look, max_ranks=DRAWN_RANKS, progress=progress)
        advice = looks[0].advice if looks else None
        advice = advice or advise_slowest(traces, explanation, draw=draw)
        explanation = add_origin(explanation)
        tune = tune_of(explanation)
        explanation = add_trials(explanation, tune)
        explanation = add_advice(explanation, advice, tried_alone(tune))
        explanation = next_by_tune(explanation, tune)
    if html:
        _write(explanation, looks, advice, html, tune)
    if perfetto:
        _write_perfetto(traces, explanation, perfetto)
    return explanation


def _write_perfetto(traces: JobTraces, explanation: Explanation, target: Path) -> None:
    from stepscope.explain.explain_job import choose_ranks
    from stepscope.ui.perfetto.write_trace import write_perfetto
    from stepscope.ui.rank_look import DRAWN_RANKS
    from stepscope.ui.say import say

    ranks = choose_ranks(explanation, DRAWN_RANKS)
    written = write_perfetto(traces, explanation, target, ranks=ranks)
    if len(ranks) < len(explanation.ranks):
        say(f"--perfetto: {len(ranks)} of {len(explanation.ranks)} ranks, those that findings name")
    say(f"for ui.perfetto.dev: {', '.join(map(str, written))}")


def _take_part(
    paths: Sequence[str | Path],
    *,
    cache: bool,
    html: Path | None,
    engine: Engine,
    memory_limit: int | None,
) -> None:
    """The share of a process that does not lead; it prints nothing."""
    from stepscope.explain.explain_job import JobTraces
    from stepscope.ui.rank_look import DRAWN_RANKS, choose_look

    try:
        traces = JobTraces(paths, cache=cache, memory_limit=memory_limit, engine=engine)
        traces.take_part(choose_look(traces, draw=html is not None), max_ranks=DRAWN_RANKS)
    except StepscopeError as error:  # the process that leads prints it
        sys.exit(error.exit_code)


def _write(
    explanation: Explanation,
    looks: Sequence[RankLook],
    advice: RankAdvice | None,
    html: Path,
    tune: FoundTune | None,
) -> None:
    from stepscope.ui.html.report import write_report

    pictures = [look.picture for look in looks if look.picture]
    with writing_html(html):
        whatif = advice.page if advice else None
        write_report(explanation, pictures, html, whatif=whatif, tune=tune)
