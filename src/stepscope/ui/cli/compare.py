"""stepscope compare: whether the step really changed, and whether a promise was kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import SlowerError, UsageError
from stepscope.records.figures import longer_or_shorter, unsigned_percent
from stepscope.records.words import counted
from stepscope.ui.cli.options import (
    check_html,
    html_option,
    json_option,
    top_option,
    writing_html,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.records.comparison import Comparison


def parse_share(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """3% or 0.03."""
    del ctx
    if value is None:
        return None
    text = value.strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise click.BadParameter(f"{value!r}: write 3% or 0.03", param=param)
    return share


def comparing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that `compare` and `ab` share; `check_ending` and `conclude` take them."""
    for option in (
        json_option,
        html_option("Write an HTML page with both distributions and what changed."),
        click.option(
            "--fail-on-slower",
            callback=parse_share,
            metavar="SHARE",
            help="Exit with code 5 if B is surely slower by more than this, such as 3%.",
        ),
        click.option(
            "--promise",
            metavar="ID",
            help="The promise that B puts to the test; `stepscope record` lists them.",
        ),
        click.option(
            "--no-promise", is_flag=True, help="Check no promise that whatif --remember recorded."
        ),
        top_option(6, 100, "Rows in each table."),
    ):
        command = option(command)
    return command


class _TwoSides(click.Command):
    """All paths after --against belong to B, so that a shell can expand a-* --against b-*."""

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


@click.command(cls=_TwoSides, name="compare")
@click.argument("paths", nargs=-1, required=True)
@click.option(
    "--against",
    multiple=True,
    metavar="B...",
    help="The runs of side B; all PATHS are then side A.",
)
@click.option(
    "--pairs",
    is_flag=True,
    help="The runs alternated: compare A's first with B's first, and so on.",
)
@click.option(
    "--unit",
    type=click.Choice(["ns", "us", "ms", "s"]),
    default="ms",
    show_default=True,
    help="Unit of the step times in a list that does not name it.",
)
@click.option(
    "--column", metavar="NAME", help="The column of a step list that holds the step times."
)
@click.option(
    "--between-starts",
    callback=parse_share,
    default="0.5%",
    show_default=True,
    metavar="SHARE",
    help="How much two starts of one command differ by chance; used if each side is one run.",
)
@click.option(
    "--steps-only", is_flag=True, help="Compare step times and phases only; read no traces."
)
@click.option(
    "--no-cache",
    is_flag=True,
    help="Read the traces themselves, not cached copies, and cache nothing.",
)
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
    **ending: Any,
) -> None:
    """Compare A and B: run folders, traces, or lists of step times.

    compare A B, or several runs per side: compare A1 A2 --against B1 B2. A folder of run folders
    stands for all of them; the folder of a `stepscope ab` stands for both sides.
    """
    from stepscope.ui.terminal.progress import shown_progress
    from stepscope.verify.compare import compare

    a, b, paired = _sides(paths, against, pairs)
    check_ending(**ending)
    with shown_progress(quiet=ending["as_json"]) as progress:
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
    conclude(comparison, cache=not no_cache, **ending)


def check_ending(html: Path | None, promise: str | None, no_promise: bool, **_: Any) -> None:
    """Refuse a page that cannot be written and an unknown promise before anything is measured."""
    check_html(html)
    if promise is None:
        return
    if no_promise:
        raise UsageError("--promise and --no-promise contradict each other")
    from stepscope.verify.track_record import find_promise

    find_promise(promise)


def conclude(
    comparison: Comparison,
    *,
    as_json: bool,
    html: Path | None,
    fail_on_slower: float | None,
    promise: str | None,
    no_promise: bool,
    top: int,
    cache: bool = True,
) -> None:
    """Answer promises, write the page, print the answer, and end as asked."""
    if not no_promise:
        from stepscope.verify.answered_promise import with_promise

        comparison = with_promise(comparison, promise)
    if html:
        from stepscope.ui.html.comparison import write_comparison

        with writing_html(html):
            write_comparison(comparison, html, cache=cache)
    if as_json:
        from stepscope.ui.comparison import comparison_json
        from stepscope.ui.json_text import write_json

        write_json(comparison_json(comparison))
    else:
        from stepscope.ui.terminal.comparison import print_comparison

        print_comparison(comparison, top=top, report=html)
    if fail_on_slower is not None and comparison.low > fail_on_slower:
        sys.stdout.flush()
        change, least = longer_or_shorter(comparison.change), longer_or_shorter(comparison.low)
        raise SlowerError(
            f"B's step is {change}, at least {least}: more than the "
            f"{unsigned_percent(fail_on_slower)} that --fail-on-slower allows"
        )


def _sides(
    paths: Sequence[str], against: Sequence[str], pairs: bool
) -> tuple[Sequence[str], Sequence[str], bool]:
    if against:
        return paths, against, pairs
    if len(paths) == 2:
        return paths[:1], paths[1:], pairs
    if len(paths) == 1:
        from stepscope.verify.pairs import AB, read_pairs

        if (Path(paths[0]) / AB).is_file():
            return (*read_pairs(Path(paths[0])), True)
    raise UsageError(
        f"two sides are compared, not {counted(len(paths), 'path')}: "
        "compare A B, or several runs per side with compare A1 A2 --against B1 B2"
    )
