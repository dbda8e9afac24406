"""stepscope bench: run the suite of training workloads by fixed rules, and compare it with
saved results.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.bench.task import parse_counts
from stepscope.bench.workload import TrainingWorkload
from stepscope.errors import NotCapturedError, SlowerError, UsageError
from stepscope.text.figures import relative_change, trimmed, unsigned_percent
from stepscope.ui.cli.compare import parse_share
from stepscope.ui.cli.options import (
    VerbCommand,
    check_html,
    complete_change,
    html_option,
    json_option,
    out_option,
    writing_html,
)
from stepscope.ui.jobs.run_folder import claim_or_refuse
from stepscope.ui.say import say

if TYPE_CHECKING:
    from stepscope.bench.request import BenchRequest
    from stepscope.bench.results import BenchComparison, BenchResults
    from stepscope.ui.bench.suite import SuiteEnd

# Options of `bench` that compare with saved results, and how they end it.


def against_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --against and --fail-on-slower; `read_base` and `stop_if_slower` take them."""
    for option in (
        click.option(
            "--fail-on-slower",
            callback=parse_share,
            metavar="SHARE",
            help="With --against: exit with code 5 if a workload is slower or waits longer by more "
            "than this, such as 3%. Its 95% interval must exclude zero.",
        ),
        click.option(
            "--against",
            type=click.Path(path_type=Path),
            metavar="FILE|RUN",
            help="Compare with a file of --save, a bench folder, or one run of a workload.",
        ),
    ):
        command = option(command)
    return command


def read_base(against: Path | None, fail_on_slower: float | None) -> BenchResults | None:
    """Read the base before anything is measured."""
    if against is None:
        if fail_on_slower is not None:
            raise UsageError("--fail-on-slower needs --against: name the base to compare with")
        return None
    from stepscope.bench.saved_results import read_results

    return read_results(against)


def compare_with(base: BenchResults, results: BenchResults, against: Path) -> BenchComparison:
    from stepscope.bench.against import compare_results

    return compare_results(base, results, str(against))


def stop_if_slower(comparison: BenchComparison, fail_on_slower: float | None) -> None:
    """Raise SlowerError for a slower workload, after the answer.

    NotCapturedError: nothing could be compared, or the machine itself became slower.
    """
    if fail_on_slower is None:
        return
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


# `bench --list --json`: what every workload says of itself.


def list_json(workloads: Sequence[TrainingWorkload]) -> dict[str, Any]:
    return {"schema": 1, "workloads": [_workload(workload) for workload in workloads]}


def _workload(workload: TrainingWorkload) -> dict[str, Any]:
    return {
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


# stepscope bench: run the suite of training workloads by fixed rules.

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


def _file_option(name: str, help_text: str) -> Callable[[Any], Any]:
    path = click.Path(path_type=Path, dir_okay=False)
    return click.option(name, type=path, metavar="FILE", help=help_text, callback=_check_folder)


def _check_folder(_context: Any, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Raise UsageError before anything is measured."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{parameter.opts[0]} {path}: its folder does not exist")
    return path


@click.command(
    cls=VerbCommand,
    name="bench",
    examples=(
        ("stepscope bench", "Run the whole suite at its smallest size"),
        ("stepscope bench --save base.json", "Measure a base to compare with later"),
        (
            "stepscope bench --against base.json --fail-on-slower 5%",
            "Exit with code 5 if a workload became slower",
        ),
        ("stepscope bench --list", "List the workloads"),
    ),
    option_groups=(
        ("What to run", ("--size", "--all", "--set", "--with", "--list", "--again")),
        ("How often and where", ("--steps", "--runs", "--ranks", "--sweep", "--memory-check")),
        ("Compare with a base", ("--save", "--against", "--fail-on-slower")),
        ("Output", ("--out", "--html", "--csv", "--json", "--quiet")),
    ),
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
@click.option("--all", "everything", is_flag=True, help="Also run the workloads outside the suite.")
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
@click.option(
    "--steps", type=click.IntRange(24), help="Steps of each run (default: as its target allows)."
)
@click.option(
    "--runs",
    type=click.IntRange(1),
    help="Runs of each workload (default: 1). With --save and --against: 5 or more, until a "
    "change of 5% would show. They take at most two minutes per workload.",
)
@_file_option("--save", "Write all results to this file, as a base for later runs.")
@click.option(
    "--again",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Repeat a saved benchmark with its own options. Write into the file whether the results "
    "agree.",
)
@against_options
@_file_option("--csv", "Write a table with one line per workload to this file.")
@html_option("Write a page with all workloads side by side. It needs no network.")
@out_option("Folder for all runs (default: stepscope-runs/<time>-bench).")
@click.option(
    "--memory-check/--no-memory-check",
    default=True,
    help="Predict first whether a workload fits into memory (on by default). Takes seconds. Plain "
    "tiny workloads skip it.",
)
@click.option("--list", "only_list", is_flag=True, help="List the workloads and run nothing.")
@json_option
@click.option("--quiet", is_flag=True, help="Print nothing while workloads run.")
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
    check_html(html)
    if only_list:
        return _list(asked["names"], as_json=as_json)
    older = read_base(against, fail_on_slower)
    base = _read_saved(context, again) if again else None
    options = _asked_before(base, again) if base and again else asked
    request = _request(options, claim=bool(save or against))
    adds_runs = bool(save or against) and options["runs"] is None
    end = _run(
        request, out, quiet=quiet, check_memory=memory_check, older=older, adds_runs=adds_runs
    )
    end = replace(end, results=_with_studies(end.results))
    if base is not None and again is not None and end.code < _SIGNALS:
        _note_rerun(base, again, end.results)
    comparison = compare_with(older, end.results, against) if older and against else None
    try:
        _write_files(end.results, save=save, csv=csv)
        if html is not None:
            _write_page(html, end.results, older, comparison)
    finally:  # a file that cannot be written takes no answer away
        files = {"saved": save, "table": csv, "page": html}
        _print(end.results, comparison, files, as_json=as_json)
    if comparison is not None and not end.code:
        stop_if_slower(comparison, fail_on_slower)
    return end.code


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
) -> SuiteEnd:
    from stepscope.bench.against import EnoughRuns
    from stepscope.bench.request import choose_tasks
    from stepscope.ui.bench.suite import SuiteEnd, require_gpu, require_torch, run_suite
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
    return SuiteEnd(results=end.results, code=end.code or (_FAILED if problems else 0))


def _with_studies(results: BenchResults) -> BenchResults:
    from stepscope.ui.advice import open_slowest
    from stepscope.ui.bench.results import with_studies

    return with_studies(results, lambda folder: open_slowest(folder, cache=True)[0])


def _list(names: tuple[str, ...], *, as_json: bool) -> int:
    from stepscope.bench import catalogue
    from stepscope.errors import StepscopeError
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
    _writing("--again", path, lambda: write_results(updated, path))
    say(f"{path}: {rerun_words(updated)}")


def _write_files(results: BenchResults, *, save: Path | None, csv: Path | None) -> None:
    if save is not None:
        from stepscope.bench.saved_results import write_results

        _writing("--save", save, lambda: write_results(results, save))
    if csv is not None:
        from stepscope.ui.bench.results import write_csv

        _writing("--csv", csv, lambda: write_csv(results, csv))


def _write_page(
    html: Path,
    results: BenchResults,
    older: BenchResults | None,
    comparison: BenchComparison | None,
) -> None:
    from stepscope.ui.html.bench_page import write_bench_page

    with writing_html(html):
        write_bench_page(results, html, older, comparison)


def _writing(option: str, path: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        raise UsageError(f"{option} {path} could not be written: {error.strerror}") from None


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
    from stepscope.ui.terminal.bench import print_bench

    print_bench(results, files)
    if comparison is not None:
        from stepscope.ui.terminal.bench import print_against

        print_against(comparison)
