"""Answer a comparison for `compare` and `ab`: the options they share, and how they end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import SlowerError, UsageError
from stepscope.text.figures import longer_or_shorter, unsigned_percent
from stepscope.ui.cli.options import html_option, json_option, read_share, top_option
from stepscope.ui.user_input import require_folder, writing

if TYPE_CHECKING:
    from stepscope.records.comparison import Comparison

_OPTIONS = (
    json_option,
    html_option("Write a page with both distributions and what changed."),
    click.option(
        "--fail-on-slower",
        callback=read_share,
        metavar="SHARE",
        help="Exit with code 5 if B is slower by more than this, such as 3%. The whole 95% "
        "interval must be above it.",
    ),
    click.option(
        "--prediction",
        "--promise",
        "promise",
        metavar="ID",
        help="The prediction that B puts to the test. `whatif --history` lists them.",
    ),
    click.option(
        "--no-prediction",
        "--no-promise",
        "no_promise",
        is_flag=True,
        help="Check no prediction that `whatif --remember` saved.",
    ),
    top_option(6, "Rows in each table."),
)


def comparing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the shared options, which are the fields of Ending."""
    for option in _OPTIONS:
        command = option(command)
    return command


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the answer is given, as the shared options say."""

    as_json: bool
    html: Path | None
    fail_on_slower: float | None
    promise: str | None
    no_promise: bool
    top: int

    def check(self) -> None:
        """Refuse an unwritable page and an unknown prediction before anything is measured."""
        require_folder(self.html, "--html")
        if self.promise is None:
            return
        if self.no_promise:
            raise UsageError("--prediction and --no-prediction contradict each other")
        from stepscope.verify.track_record import find_promise

        find_promise(self.promise)


def conclude(comparison: Comparison, ending: Ending, *, cache: bool = True) -> None:
    """Check predictions, write the page, print the answer, and end as asked."""
    html, allowed = ending.html, ending.fail_on_slower
    if not ending.no_promise:
        from stepscope.verify.answered_predictions import with_promise

        comparison = with_promise(comparison, ending.promise)
    if html:
        from stepscope.ui.html.comparison import write_comparison

        with writing(html, "--html"):
            write_comparison(comparison, html, cache=cache)
    if ending.as_json:
        from stepscope.ui.json_text import write_json
        from stepscope.ui.topics.comparison import comparison_json

        write_json(comparison_json(comparison))
    else:
        from stepscope.ui.terminal.comparison import print_comparison

        print_comparison(comparison, top=ending.top, report=html)
    if allowed is not None and comparison.low > allowed:
        sys.stdout.flush()
        change, least = longer_or_shorter(comparison.change), longer_or_shorter(comparison.low)
        raise SlowerError(
            f"B's step is {change}, at least {least}: more than the "
            f"{unsigned_percent(allowed)} that --fail-on-slower allows"
        )
