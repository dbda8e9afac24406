"""stepscope bench: run the suite of training workloads by fixed rules, and compare it with
saved results.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.bench.task import parse_counts
from stepscope.bench.workload import TrainingWorkload
from stepscope.errors import NotCapturedError, SlowerError, StepscopeError, UsageError
from stepscope.text.figures import relative_change, trimmed, unsigned_percent
from stepscope.ui.cli.options import (
    complete_change,
    count_option,
    file_option,
    flag,
    html_option,
    json_option,
    out_option,
    read_share,
    verb,
)
from stepscope.ui.jobs.run_folder import claim_or_refuse
from stepscope.ui.say import say
from stepscope.ui.user_input import require_folder, writing

if TYPE_CHECKING:
    from stepscope.bench.request import BenchRequest
    from stepscope.bench.results import BenchComparison, BenchResults

_FAILED, _SIGNALS = 1, 128
_DECIDES_WHAT_RUNS = (
    *("names", "size", "everything", "changes", "remedies", "ranks", "sweep", "steps", "runs"),
)


def _remedy_sets(
    _context: Any, _parameter: Any, texts: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """Read each --with as one set; raise UsageError for an unknown change."""
    if not texts:
        return ((),)
    from stepscope.bench.request import PLAIN
    from stepscope.fix.named_changes import choose_all

    sets = (() if text == PLAIN else tuple(map(str, choose_all(text.split(",")))) for text in texts)
    return tuple(dict.fromkeys(sets))


def _changes(_context: Any, _parameter: Any, texts: tuple[str, ...]) -> dict[str, str]:
    changes = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if not name or not value:
            raise UsageError(f"--set {text}: write NAME=VALUE, such as --set batch=16")
        changes[name] = value
    return changes


def _ranks(_context: Any, _parameter: Any, text: str) -> tuple[int, ...]:
    return parse_counts(text, f"--ranks {text}: name numbers of processes, such as 1,2,4")


def _sweep(_context: Any, _parameter: Any, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    name, _, values = (part.strip() for part in text.partition("="))
    if name != "batch":
        raise UsageError(f"--sweep {text}: only the batch size can be swept, such as batch=8,16,32")
    return parse_counts(values, f"--sweep {text}: name batch sizes, such as batch=8,16,32")


@verb(
    "bench",
    examples=(
        ("stepscope bench", "Run the whole suite at its smallest size"),
        ("stepscope bench --save base.json", "Measure a base to compare with later"),
        (
            "stepscope bench --against base.json --fail-on-slower 5%",
            "Exit with code 5 if a workload became slower",
        ),
        ("stepscope bench --list", "List the workloads"),
    ),
    groups={
        "What to run": "--size --all --set --with --list --again",
        "How often and where": "--steps --runs --ranks --sweep --memory-check",
        "Compare with a base": "--save --against --fail-on-slower",
        "Output": "--out --html --csv --json --quiet",
    },
)
@click.argument("names", nargs=-1)
@click.option(
    "--size",
    default="tiny",
    show_default=True,
    metavar="tiny|small|paper",
    help="Size of the workloads: tiny takes seconds on a CPU, small seconds on one GPU. "
    "paper has the published shape.",
)
@flag("--all", "Also run the workloads outside the suite.", "everything")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_changes,
    help="Change a setting of the workloads. The result is then not the suite's. Repeatable.",
)
@click.option(
    "--with",
    "remedies",
    multiple=True,
    metavar="CHANGE[,CHANGE]",
    callback=_remedy_sets,
    shell_complete=complete_change,
    help="Apply these changes; `stepscope tune --list` lists them. Several --with take turns and "
    "are compared. --with none is the workload without changes.",
)
@click.option(
    "--ranks",
    default="1",
    show_default=True,
    metavar="N[,N]",
    callback=_ranks,
    help="Processes that torchrun starts. Several numbers make a scaling study.",
)
@click.option(
    "--sweep",
    metavar="batch=N,N,...",
    callback=_sweep,
    help="Measure and predict throughput for several batch sizes.",
)
@count_option("--steps", "Steps of each run (default: as its target allows).", least=24)
@count_option(
    "--runs",
    "Runs of each workload (default: 1). With --save and --against: 5 or more, until a "
    "change of 5% would show. They take at most two minutes per workload.",
)
@file_option("--save", "Write all results to this file, as a base for later runs.")
@click.option(
    "--again",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Repeat a saved benchmark with its own options. Write into the file whether the results "
    "agree.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="FILE|RUN",
    help="Compare with a file of --save, a bench folder, or one run of a workload.",
)
@click.option(
    "--fail-on-slower",
    callback=read_share,
    metavar="SHARE",
    help="With --against: exit with code 5 if a workload is slower or waits longer by more "
    "than this, such as 3%. Its 95% interval must exclude zero.",
)
@file_option("--csv", "Write a table with one line per workload to this file.")
@html_option("Write a page with all workloads side by side. It needs no network.")
@out_option("Folder for all runs (default: stepscope-runs/<time>-bench).")
@click.option(
    "--memory-check/--no-memory-check",
    default=True,
    help="Predict first whether a workload fits into memory (on by default). Takes seconds. Plain "
    "tiny workloads skip it.",
)
@flag("--list", "List the workloads and run nothing.", "only_list")
@json_option
@flag("--quiet", "Print nothing while workloads run.")
@click.pass_context
def command(
    context: click.Context,
    /,
    again: Path | None,
    only_list: bool,
    save: Path | None,
    against: Path | None,
    fail_on_slower: float | None,
    csv: Path | None,
    html: Path | None,
    out: Path | None,
    memory_check: bool,
    as_json: bool,
    quiet: bool,
    **asked: Any,
) -> int:
    """Train the suite's workloads by fixed rules and print throughput, memory, loss and verdict.

    NAMES are workloads (default: the suite). Each trains in a process of its own, with fixed
    hyper-parameters, seeds and warm-up.
    """
    require_folder(html, "--html")
    if only_list:
        return _list(asked["names"], as_json=as_json)
    from stepscope.bench.against import compare_results
    from stepscope.ui.advice import open_slowest
    from stepscope.ui.bench.results import with_studies

    older = _read_base(against, fail_on_slower)
    base = _read_saved(context, again) if again else None
    options = _asked_before(base, again) if base and again else asked
    request = _request(options, claim=bool(save or against))
    adds_runs = bool(save or against) and options["runs"] is None
    results, code = _run(
        request, out, quiet=quiet, check_memory=memory_check, older=older, adds_runs=adds_runs
    )
    results = with_studies(results, lambda folder: open_slowest(folder, cache=True)[0])
    if base is not None and again is not None and code < _SIGNALS:
        _note_rerun(base, again, results)
    compared = compare_results(older, results, str(against)) if older and against else None
    try:
        if save is not None:
            from stepscope.bench.saved_results import write_results

            with writing(save, "--save"):
                write_results(results, save)
        if csv is not None:
            from stepscope.ui.bench.results import write_csv

            with writing(csv, "--csv"):
                write_csv(results, csv)
        if html is not None:
            from stepscope.ui.html.bench_page import write_bench_page

            with writing(html, "--html"):
                write_bench_page(results, html, older, compared)
    finally:  # a file that cannot be written takes no answer away
        files = {"saved": save, "table": csv, "page": html}
        _print(results, compared, files, as_json=as_json)
    if compared is not None and fail_on_slower is not None and not code:
        _stop_if_slower(compared, fail_on_slower)
    return code


def _read_base(against: Path | None, fail_on_slower: float | None) -> BenchResults | None:
    """Read the base before anything is measured."""
    if against is None:
        if fail_on_slower is not None:
            raise UsageError("--fail-on-slower needs --against: name the base to compare with")
        return None
    from stepscope.bench.saved_results import read_results

    return read_results(against)


def _stop_if_slower(comparison: BenchComparison, fail_on_slower: float) -> None:
    """Raise SlowerError for a slower workload, after the answer.

    NotCapturedError: nothing could be compared, or the machine itself became slower.
    """
    from stepscope.bench.against import slower_by, slower_with_machine
    from stepscope.ui.bench.words import row_name

    sys.stdout.flush()
    if all(change.verdict == "not comparable" for change in comparison.workloads):
        raise NotCapturedError(
            f"--fail-on-slower: nothing could be compared with {comparison.against}"
        )
    alarms = slower_by(comparison, fail_on_slower)
    if alarms:
        listed = ", ".join(
            f"{row_name(change)} {relative_change(change.counted_change or 0.0)}"
            + (" (waiting)" if change.decided_by == "waiting" else "")
            for change in alarms
        )
        allowed = trimmed(unsigned_percent(fail_on_slower))
        raise SlowerError(
            f"slower than {comparison.against}: {listed}; --fail-on-slower allows {allowed}"
        )
    undecided = slower_with_machine(comparison, fail_on_slower)
    if undecided:
        listed = ", ".join(map(row_name, undecided))
        raise NotCapturedError(
            f"--fail-on-slower: {listed} slower than {comparison.against}, but so is the machine "
            "itself: measure the base again"
        )


def _request(asked: dict[str, Any], *, claim: bool) -> BenchRequest:
    """Return what to run; with `claim`, later results will be compared with these."""
    from stepscope.bench.request import BenchRequest, parse_size
    from stepscope.bench.rules import CLAIM_RUNS

    runs = asked["runs"] or (CLAIM_RUNS if claim else 1)
    return BenchRequest(**{**asked, "size": parse_size(asked["size"]), "runs": runs})


def _run(
    request: BenchRequest,
    out: Path | None,
    *,
    quiet: bool,
    check_memory: bool,
    older: BenchResults | None,
    adds_runs: bool,
) -> tuple[BenchResults, int]:
    """Return the results and the exit code."""
    from stepscope.bench.against import EnoughRuns
    from stepscope.bench.request import choose_tasks
    from stepscope.ui.bench.suite import require_gpu, require_torch, run_suite
    from stepscope.ui.progress import shown_trials

    require_torch()
    tasks, problems = choose_tasks(request)
    require_gpu(request)
    for problem in problems:
        say(problem)
    folder = claim_or_refuse(out, ("bench",))
    with shown_trials(quiet=quiet) as progress:
        progress.news(f"bench folder {folder}")
        end = run_suite(
            tasks,
            runs=request.runs,
            folder=folder,
            command=request.command,
            progress=progress,
            check_memory=check_memory,
            enough=EnoughRuns(workloads=len(tasks), base=older) if adds_runs else None,
        )
    return end.results, end.code or (_FAILED if problems else 0)


def list_json(workloads: Sequence[TrainingWorkload]) -> dict[str, Any]:
    """Return what every workload says of itself."""
    rows = [
        {
            "name": workload.name,
            "task": workload.task,
            "source": workload.source,
            "samples": workload.samples,
            "tags": sorted(workload.tags),
            "sizes": {
                size: {
                    "settings": dict(settings),
                    "target_loss": workload.targets[size].loss,
                    "target_steps": workload.targets[size].steps,
                }
                for size, settings in workload.sizes.items()
            },
        }
        for workload in workloads
    ]
    return {"schema": 1, "workloads": rows}


def _list(names: tuple[str, ...], *, as_json: bool) -> int:
    from stepscope.bench import catalogue
    from stepscope.ui.bench.suite import require_torch

    require_torch()
    workloads, code = [], 0
    for problem in catalogue.problems():
        say(problem)
    for name in names or catalogue.names():
        try:
            workloads.append(catalogue.load(name))
        except StepscopeError as error:
            if names:
                raise
            say(str(error))
            code = _FAILED
    if as_json:
        from stepscope.ui.json_text import write_json

        write_json(list_json(workloads))
    else:
        from stepscope.ui.terminal.bench import print_list

        print_list(workloads)
    return code


def _read_saved(context: click.Context, path: Path) -> BenchResults:
    """Read a saved file; raise UsageError if the command line has options beside --again."""
    from stepscope.bench.saved_results import read_results

    given = click.core.ParameterSource.COMMANDLINE
    for name in _DECIDES_WHAT_RUNS:
        if context.get_parameter_source(name) is given and context.params[name]:
            raise UsageError(f"--again repeats {path} with its own options: leave out all others")
    results = read_results(path)
    if results.command[:2] != ("stepscope", "bench"):
        raise UsageError(f"--again {path}: the file does not name the command that wrote it")
    return results


def _asked_before(base: BenchResults, path: Path) -> dict[str, Any]:
    """Return the options of the command that wrote the file."""
    try:
        params = command.make_context("bench", list(base.command[2:])).params
    except click.ClickException as error:
        raise UsageError(
            f"--again {path}: {shlex.join(base.command)}: {error.format_message()}"
        ) from None
    return {name: params[name] for name in _DECIDES_WHAT_RUNS}


def _note_rerun(base: BenchResults, path: Path, results: BenchResults) -> None:
    """Write into the file itself whether the results could be repeated."""
    from stepscope.bench.saved_results import write_results
    from stepscope.ui.bench.results import with_rerun
    from stepscope.ui.bench.words import rerun_words

    updated = with_rerun(base, results, str(path))
    with writing(path, "--again"):
        write_results(updated, path)
    say(f"{path}: {rerun_words(updated)}")


def _print(
    results: BenchResults,
    comparison: BenchComparison | None,
    files: dict[str, Path | None],
    *,
    as_json: bool,
) -> None:
    if as_json:
        import msgspec

        from stepscope.ui.json_text import write_json

        compared = {"against": msgspec.to_builtins(comparison)} if comparison else {}
        write_json({**msgspec.to_builtins(results), **compared})
        return
    from stepscope.ui.terminal.bench import print_against, print_bench

    print_bench(results, files)
    if comparison is not None:
        print_against(comparison)
