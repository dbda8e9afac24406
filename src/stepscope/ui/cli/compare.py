"""stepscope compare: show whether the step changed, and whether a prediction was right.

`ab` takes the same options for its answer, and ends the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import SlowerError, UsageError
from stepscope.text.figures import longer_or_shorter, unsigned_percent
from stepscope.text.words import counted
from stepscope.ui.cli.options import (
    VerbCommand,
    flag,
    html_option,
    json_option,
    mode_option,
    no_cache_option,
    paths_argument,
    read_share,
    top_option,
    verb,
)
from stepscope.ui.user_input import require_folder, writing

if TYPE_CHECKING:
    from stepscope.records.comparison import Comparison

# The options that `compare` and `ab` share, and how they end.

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


class _TwoSides(VerbCommand):
    """Give all paths after --against to B, so that a shell can expand a-* --against b-*."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        out: list[str] = []
        against = False
        for word in args:
            if word == "--against":
                against = True
                continue
            if word.startswith("-") and word != "-":
                against = False
            out += ["--against", word] if against else [word]
        if args and args[-1] == "--against":
            raise UsageError("--against: name B's runs after it")
        return super().parse_args(ctx, out)


@verb(
    "compare",
    cls=_TwoSides,
    examples=(
        ("stepscope compare runs/before runs/after", "Compare two runs"),
        (
            "stepscope compare before-* --against after-* --pairs",
            "Compare several starts of each, pair by pair",
        ),
        (
            "stepscope compare --run -- python a.py --- python b.py",
            "Run two commands in turns, then compare them",
        ),
    ),
    groups={
        "The two sides": "--against --pairs --run --between-starts --steps-only",
        "Lists of step times": "--unit --column",
        "Predictions": "--prediction --no-prediction",
        "Output": "--json --html --top --fail-on-slower",
    },
    modes={"--run": "ab"},
)
@paths_argument
@click.option(
    "--against",
    multiple=True,
    metavar="B...",
    help="The runs of side B. All PATHS are then side A.",
)
@mode_option(
    "--run", "Run COMMAND_A --- COMMAND_B in turns first. `compare --run --help` has its options."
)
@flag("--pairs", "The runs took turns: compare A's first with B's first, and so on.")
@click.option(
    "--unit",
    type=click.Choice(["ns", "us", "ms", "s"]),
    default="ms",
    show_default=True,
    help="Unit of the step times, if the list does not name it.",
)
@click.option("--column", metavar="NAME", help="The column that holds the step times.")
@click.option(
    "--between-starts",
    callback=read_share,
    default="0.5%",
    show_default=True,
    metavar="SHARE",
    help="How much two starts of one command differ by chance. Used if each side is one run.",
)
@flag("--steps-only", "Compare step times and phases only, read no traces.")
@no_cache_option
@comparing_options
def command(
    paths: tuple[str, ...],
    against: tuple[str, ...],
    pairs: bool,
    unit: str,
    column: str | None,
    between_starts: float,
    steps_only: bool,
    no_cache: bool,
    **answer: Any,
) -> None:
    """Compare two runs and show whether the difference is real, with a 95% interval.

    A and B are run folders, traces, or lists of step times. A folder of run folders stands for all
    of them. The folder of `compare --run` stands for both sides.
    """
    from stepscope.ui.progress import shown_progress
    from stepscope.verify.compare import compare

    a, b, paired = _sides(paths, against, pairs)
    ending = Ending(**answer)
    ending.check()
    with shown_progress(quiet=ending.as_json) as progress:
        comparison = compare(
            a,
            b,
            paired=paired,
            unit=unit,
            column=column,
            between_starts=between_starts,
            explain=not steps_only,
            cache=not no_cache,
            progress=progress,
        )
    conclude(comparison, ending, cache=not no_cache)


def _sides(
    paths: Sequence[str], against: Sequence[str], pairs: bool
) -> tuple[Sequence[str], Sequence[str], bool]:
    if against:
        return paths, against, pairs
    if len(paths) == 2:
        return paths[:1], paths[1:], pairs
    if len(paths) == 1:
        from stepscope.verify.runs import AB, read_pairs

        if (Path(paths[0]) / AB).is_file():
            return (*read_pairs(Path(paths[0])), True)
    raise UsageError(
        f"two sides are compared, not {counted(len(paths), 'path')}: "
        "compare A B, or several runs per side with compare A1 A2 --against B1 B2"
    )
