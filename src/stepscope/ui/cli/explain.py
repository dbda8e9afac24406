"""stepscope explain: where each training step's time went."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepscope.errors import StepscopeError, UsageError
from stepscope.ui.cli.options import (
    SIZE,
    VerbCommand,
    check_html,
    check_perfetto,
    complete_file,
    html_option,
    json_option,
    no_cache_option,
    top_option,
    writing_html,
)

if TYPE_CHECKING:
    from stepscope.explain.engines import Engine, EngineName
    from stepscope.explain.explain_job import JobTraces
    from stepscope.records.explanation import Explanation
    from stepscope.trace.run_folder.related_runs import FoundTune
    from stepscope.ui.advice import RankAdvice, RankLook


@click.command(
    cls=VerbCommand,
    name="explain",
    examples=(
        ("stepscope explain stepscope-runs/my-run", "One screen: verdict, findings, what to do"),
        ("stepscope explain trace.json.gz --full", "Every table of one trace"),
        ("stepscope explain traces/ --html report.html", "A report for a browser"),
    ),
    option_groups=(
        ("What to show", ("--full", "--top", "--memory-limit")),
        ("Output", ("--json", "--html", "--perfetto")),
        ("Reading", ("--engine", "--workers", "--no-cache")),
    ),
)
@click.argument("paths", nargs=-1, required=True, shell_complete=complete_file)
@json_option
@click.option(
    "--full",
    is_flag=True,
    help="Print every table: ranks, collectives, all findings, efficiency, memory, kernels, "
    "operators. Without it, one screen.",
)
@html_option("Write an HTML report with timeline, flame graphs and tables. It needs no network.")
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the trace for ui.perfetto.dev, with tracks for budget, idle causes, critical path "
    "and findings. Compressed if FILE ends with .gz. One file per rank.",
)
@no_cache_option
@top_option(8, 100, "Rows in each table of --full.")
@click.option(
    "--engine",
    type=click.Choice(["pool", "ray", "torch"]),
    default="pool",
    show_default=True,
    help="Where to read the files: in processes here, on a Ray cluster, or in the ranks of a "
    "torchrun job.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Files to read at the same time (default: one per CPU core).",
)
@click.option(
    "--memory-limit",
    type=SIZE,
    help="Memory that training may use on each device, such as 24GB. Sets the largest batch size "
    "that fits (default: all that the device has).",
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
    memory_limit: int | None,
) -> None:
    """Explain where each training step's time goes, from a run folder or from traces.

    PATHS are run folders, PyTorch profiler traces (.json, .json.gz, .json.zst), Nsight Systems
    SQLite exports or CUDA memory snapshots. A folder holds one trace per rank. URLs such as s3://
    and gs:// work too. Of a tune folder, the baseline is explained. Nothing leaves this machine.
    """
    from stepscope.explain.engines import open_engine

    with open_engine(engine, workers) as chosen:
        if not chosen.leads:
            _take_part(
                paths, cache=not no_cache, html=html, engine=chosen, memory_limit=memory_limit
            )
            return
        try:
            explanation = explain_paths(
                paths,
                cache=not no_cache,
                html=html,
                perfetto=perfetto,
                quiet=as_json,
                engine=chosen,
                memory_limit=memory_limit,
            )
        except UsageError as error:
            if html or perfetto:
                raise
            _answer_several(error, paths, cache=not no_cache, as_json=as_json)
            return
    if as_json:
        from stepscope.ui.json_text import write_json
        from stepscope.ui.topics.explanation_json import explanation_json

        write_json(explanation_json(explanation))
        return
    if full:
        from stepscope.ui.terminal.explanation import print_explanation

        print_explanation(explanation, top=top, report=html)
        return
    from stepscope.ui.terminal.short import print_short

    more = "--full prints all tables" + ("" if html else "; --html FILE a report")
    print_short(explanation, more=more, report=html, memory_limit=memory_limit)


def _answer_several(error: UsageError, paths: Sequence[str], *, cache: bool, as_json: bool) -> None:
    """Print a line for each job, if the error says that there are several; else raise it."""
    from stepscope.ui.several_jobs import explain_apart, several_json

    several = explain_apart(error, paths, cache=cache)
    if as_json:
        from stepscope.ui.json_text import write_json

        write_json(several_json(several))
        return
    from stepscope.ui.several_jobs import print_several

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
    from stepscope.trace.run_folder.related_runs import traced_run
    from stepscope.ui.advice import DRAWN_RANKS, add_advice, advise_slowest, choose_look
    from stepscope.ui.progress import shown_progress
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
    from stepscope.ui.advice import DRAWN_RANKS
    from stepscope.ui.perfetto_trace import write_perfetto
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
    """Do the share of a process that does not lead; it prints nothing."""
    from stepscope.explain.explain_job import JobTraces
    from stepscope.ui.advice import DRAWN_RANKS, choose_look

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
