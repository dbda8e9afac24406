"""Options of `bench` that compare with saved results, and how they end it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import NotCapturedError, SlowerError, UsageError
from stepscope.records.figures import relative_change, trimmed, unsigned_percent
from stepscope.ui.cli.compare import parse_share

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.records.bench_comparison import BenchComparison
    from stepscope.records.bench_result import BenchResults


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
