"""stepscope bench: run a suite of training workloads under capture, by fixed rules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import UsageError
from stepscope.ui.cli.options import check_html, html_option, json_option, out_option, writing_html
from stepscope.ui.run_folder import claim_or_refuse

if TYPE_CHECKING:
    from stepscope.bench.task import BenchTask
    from stepscope.records.bench_result import BenchResults

_SIZES = ("tiny", "small", "paper")
_PLAIN = "none"
_EXTRA = "extra"  # tag of workloads that run by name or with --all only


def _remedy_sets(_context: Any, _parameter: Any, texts: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Each --with is one set; UsageError for a remedy that nothing has."""
    if not texts:
        return [()]
    from stepscope.fix.chosen import choose_all

    return [
        () if text == _PLAIN else tuple(map(str, choose_all(text.split(",")))) for text in texts
    ]


def _changes(_context: Any, _parameter: Any, texts: tuple[str, ...]) -> dict[str, str]:
    changes = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name or not value:
            raise UsageError(f"--set {text}: write NAME=VALUE, such as --set batch=16")
        changes[name.strip()] = value.strip()
    return changes


@click.command(name="bench")
@click.argument("names", nargs=-1)
@click.option(
    "--size",
    default="tiny",
    show_default=True,
    metavar="|".join(_SIZES),
    help="tiny: seconds on a CPU. small: seconds on one GPU. paper: the published shape.",
)
@click.option("--all", "everything", is_flag=True, help="Also the workloads beside the suite.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_changes,
    help="Change a setting of the workloads. The result is no longer the suite's.",
)
@click.option(
    "--with",
    "remedies",
    multiple=True,
    metavar="ID[,ID]",
    callback=_remedy_sets,
    help="Apply these remedies. Given several times, the sets take turns; none is one of them.",
)
@click.option("--ranks", default=1, show_default=True, type=click.IntRange(1), help="Processes.")
@click.option("--steps", type=click.IntRange(24), help="Steps of each run.")
@click.option(
    "--runs",
    type=click.IntRange(1),
    help="Runs of each workload (default: 1; with --save 5, which a claim needs).",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write all results to this file, to compare later ones with it.",
)
@click.option("--csv", type=click.Path(path_type=Path, dir_okay=False), help="Write a table.")
@html_option("Write a page with all workloads side by side to this file. It needs no network.")
@out_option("Folder for all runs (default: stepscope-runs/<time>-bench).")
@click.option("--list", "only_list", is_flag=True, help="List the workloads, run nothing.")
@json_option
@click.option("--quiet", is_flag=True, help="Print nothing while workloads run.")
def command(
    names: tuple[str, ...],
    size: str,
    everything: bool,
    changes: dict[str, str],
    remedies: list[tuple[str, ...]],
    ranks: int,
    steps: int | None,
    runs: int | None,
    save: Path | None,
    csv: Path | None,
    html: Path | None,
    out: Path | None,
    only_list: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Train the workloads NAMES (default: the suite), each in a process of its own, and print
    throughput, busy share, memory, loss and verdict of each.

    Hyper-parameters, seeds and warm-up are fixed: docs/bench.md has the rules.
    """
    del only_list
    check_html(html)
    tasks = _tasks(names, size, changes, remedies, ranks, steps)
    folder = claim_or_refuse(out, ("bench",))
    from stepscope.ui.bench.suite import run_suite
    from stepscope.ui.terminal.tune_progress import shown_trials

    with shown_trials(quiet=quiet) as progress:
        progress.news(f"bench folder {folder}")
        end = run_suite(tasks, runs=runs or 1, folder=folder, command=(), progress=progress)
    if as_json:
        import msgspec

        from stepscope.ui.json_text import write_json

        write_json(msgspec.to_builtins(end.results))
    return end.code


def _tasks(names, size, changes, remedies, ranks, steps) -> list[BenchTask]:  # type: ignore
    from stepscope.bench import catalogue
    from stepscope.bench.task import BenchTask, checked

    workloads = [catalogue.load(name) for name in names or catalogue.names()]
    return [
        checked(
            BenchTask(workload=w, size=size, changes=changes, remedies=r, ranks=ranks, steps=steps)
        )
        for w in workloads
        for r in remedies
    ]
