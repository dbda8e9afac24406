"""The options of `bench` that compare with saved results, and how they end it."""

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
    """--against and --fail-on-slower; `read_base` and `conclude_against` take them."""
    for option in (
        click.option(
            "--fail-on-slower",
            callback=parse_share,
            metavar="SHARE",
            help="With --against: exit with code 5 if a workload is surely slower, or surely waits "
            "longer, and by more than this as measured, such as 3%.",
        ),
        click.option(
            "--against",
            type=click.Path(path_type=Path),
            metavar="FILE|RUN",
            help="Compare with the results of --save, a bench's folder, or one run of a workload.",
        ),
    ):
        command = option(command)
    return command


def read_base(against: Path | None, fail_on_slower: float | None) -> BenchResults | None:
    """Before anything is measured: a base that cannot be read is refused."""
    if against is None:
        if fail_on_slower is not None:
            raise UsageError("--fail-on-slower needs --against: slower than what?")
        return None
    from stepscope.bench.saved_results import read_results

    return read_results(against)


def compare_with(base: BenchResults, results: BenchResults, against: Path) -> BenchComparison:
    from stepscope.bench.against import compare_results

    return compare_results(base, results, str(against))


def stop_if_slower(comparison: BenchComparison, fail_on_slower: float | None) -> None:
    """After the answer: SlowerError for an alarm, NotCapturedError if nothing could be compared, or
    if the machine itself became slower."""
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
