"""stepscope explain: where each training step's time went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepscope.errors import StepscopeError, UsageError
from stepscope.ui.cli.options import (
    SIZE,
    count_option,
    flag,
    html_option,
    json_option,
    no_cache_option,
    paths_argument,
    top_option,
    verb,
)

if TYPE_CHECKING:
    from stepscope.explain.engines import EngineName


@verb(
    "explain",
    examples=(
        ("stepscope explain stepscope-runs/my-run", "One screen: verdict, findings, what to do"),
        ("stepscope explain trace.json.gz --full", "Every table of one trace"),
        ("stepscope explain traces/ --html report.html", "A report for a browser"),
    ),
    groups={
        "What to show": "--full --top --memory-limit",
        "Output": "--json --html --perfetto",
        "Reading": "--engine --workers --no-cache",
    },
)
@paths_argument
@json_option
@flag(
    "--full",
    "Print every table: ranks, collectives, all findings, efficiency, memory, kernels, "
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
@top_option(8, "Rows in each table of --full.")
@click.option(
    "--engine",
    type=click.Choice(["pool", "ray", "torch"]),
    default="pool",
    show_default=True,
    help="Where to read the files: in processes here, on a Ray cluster, or in the ranks of a "
    "torchrun job.",
)
@count_option("--workers", "Files to read at the same time (default: one per CPU core).")
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
    from stepscope.ui.api import explain_paths
    from stepscope.ui.json_text import write_json

    cache = not no_cache
    with open_engine(engine, workers) as chosen:
        if not chosen.leads:  # the process that leads prints the answer, also an error
            from stepscope.explain.explain_job import JobTraces
            from stepscope.ui.advice import DRAWN_RANKS, choose_look

            try:
                traces = JobTraces(paths, cache=cache, memory_limit=memory_limit, engine=chosen)
                look = choose_look(traces, draw=html is not None)
                traces.take_part(look, max_ranks=DRAWN_RANKS)
            except StepscopeError as error:
                sys.exit(error.exit_code)
            return
        try:
            explanation = explain_paths(
                paths,
                cache=cache,
                html=html,
                perfetto=perfetto,
                quiet=as_json,
                engine=chosen,
                memory_limit=memory_limit,
            )
        except UsageError as error:
            if html or perfetto:
                raise
            from stepscope.ui.several_jobs import explain_apart, print_several, several_json

            several = explain_apart(error, paths, cache=cache)
            if as_json:
                write_json(several_json(several))
            else:
                print_several(several)
            return
    if as_json:
        from stepscope.ui.topics.explanation_json import explanation_json

        write_json(explanation_json(explanation))
    elif full:
        from stepscope.ui.terminal.explanation import print_explanation

        print_explanation(explanation, top=top, report=html)
    else:
        from stepscope.ui.terminal.short import print_short

        more = "--full prints all tables" + ("" if html else "; --html FILE a report")
        print_short(explanation, more=more, report=html, memory_limit=memory_limit)
