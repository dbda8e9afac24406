"""stepscope compare: did the step really change, and did it keep what was promised?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import SlowerError, UsageError
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.records.comparison import Comparison

AB = "ab.json"


def share(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """3% or 0.03."""
    del ctx
    if value is None:
        return None
    text = value.strip()
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1:
        raise click.BadParameter(f"{value!r}: write 3% or 0.03", param=param)
    return found


def comparing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What `compare` and `ab` have in common."""
    for option in (
        click.option(
            "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."
        ),
        click.option(
            "--html",
            type=click.Path(path_type=Path, dir_okay=False),
            help="Write an HTML page with both distributions and what changed.",
        ),
        click.option(
            "--fail-on-slower",
            callback=share,
            metavar="SHARE",
            help="Exit with code 5 when B is slower by more than this, such as 3%, at the least.",
        ),
        click.option(
            "--promise",
            metavar="ID",
            help="The promise that B tries; `stepscope record` lists them.",
        ),
        click.option(
            "--no-promise",
            is_flag=True,
            help="Do not check a promise that was kept with whatif --remember.",
        ),
        click.option(
            "--top",
            default=6,
            show_default=True,
            type=click.IntRange(1, 100),
            help="Rows in each table.",
        ),
    ):
        command = option(command)
    return command


class _Sides(click.Command):
    """All paths behind --against are B's, so that shells can fill them in: a-* --against b-*."""

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
            raise UsageError("--against: name B's runs behind it")
        return super().parse_args(ctx, out)


@click.command(cls=_Sides, name="compare", short_help="did the step really change, A against B")
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
    help="The runs took turns: compare A's first with B's first, and so on.",
)
@click.option(
    "--unit",
    type=click.Choice(["ns", "us", "ms", "s"]),
    default="ms",
    show_default=True,
    help="Unit of step times in lists that do not name it.",
)
@click.option("--column", metavar="NAME", help="Which column of a step list holds the step times.")
@click.option(
    "--between-starts",
    callback=share,
    default="0.5%",
    show_default=True,
    metavar="SHARE",
    help="How much two starts of one command differ by chance; used where each side is one run.",
)
@click.option(
    "--steps-only", is_flag=True, help="Compare step times and phases only; read no traces."
)
@click.option(
    "--no-cache",
    is_flag=True,
    help="Read the traces themselves, not copies kept from earlier, and keep none.",
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
    as_json: bool,
    html: Path | None,
    fail_on_slower: float | None,
    promise: str | None,
    no_promise: bool,
    top: int,
) -> None:
    """Compare A and B: run folders, traces, or lists of step times.

    compare A B, or several runs a side: compare A1 A2 --against B1 B2. A folder of run folders
    stands for all of them; the folder that `stepscope ab` left stands for both sides.
    """
    from stepscope.ui.terminal.progress import shown_progress
    from stepscope.verify.compare import compare

    a, b, paired = _sides(paths, against, pairs)
    check_report(html)
    check_promise(promise, no_promise)
    with shown_progress(quiet=as_json) as progress:
        found = compare(
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
    conclude(
        found,
        as_json=as_json,
        html=html,
        fail_on_slower=fail_on_slower,
        promise=promise,
        no_promise=no_promise,
        top=top,
        cache=not no_cache,
    )


def check_report(html: Path | None) -> None:
    """Before anything is measured."""
    if html and not html.absolute().parent.is_dir():
        raise UsageError(f"--html {html}: its folder does not exist")


def check_promise(promise: str | None, no_promise: bool) -> None:
    """Before anything is measured: an id that nobody has would be told too late."""
    if promise is None:
        return
    if no_promise:
        raise UsageError("--promise and --no-promise contradict each other")
    from stepscope.verify.track_record import find_promise

    find_promise(promise)


def conclude(
    found: Comparison,
    *,
    as_json: bool,
    html: Path | None,
    fail_on_slower: float | None,
    promise: str | None,
    no_promise: bool,
    top: int,
    cache: bool = True,
) -> None:
    """Say it, write it down, and end as asked."""
    if not no_promise:
        from stepscope.verify.answered_promise import with_promise

        found = with_promise(found, promise)
    if html:
        _write_report(found, html, cache)
    if as_json:
        from stepscope.ui.comparison import comparison_json
        from stepscope.ui.json_text import write_json

        write_json(comparison_json(found))
    else:
        from stepscope.ui.terminal.comparison import print_comparison

        print_comparison(found, top=top, report=html)
    if fail_on_slower is not None and found.low > fail_on_slower:
        sys.stdout.flush()
        raise SlowerError(
            f"B is slower by {found.change:.1%}, at least {found.low:.1%}: more than the "
            f"{fail_on_slower:.1%} that --fail-on-slower allows"
        )


def _write_report(found: Comparison, html: Path, cache: bool) -> None:
    from stepscope.ui.html.comparison import write_comparison

    try:
        write_comparison(found, html, cache=cache)
    except OSError as error:
        raise UsageError(f"--html {html} could not be written: {error.strerror}") from None


def _sides(
    paths: Sequence[str], against: Sequence[str], pairs: bool
) -> tuple[Sequence[str], Sequence[str], bool]:
    if against:
        return paths, against, pairs
    if len(paths) == 2:
        return paths[:1], paths[1:], pairs
    if len(paths) == 1 and (Path(paths[0]) / AB).is_file():
        from stepscope.verify.pairs import read_pairs

        return (*read_pairs(Path(paths[0])), True)
    raise UsageError(
        f"two sides are compared, not {counted(len(paths), 'path')}: "
        "compare A B, or several runs a side with compare A1 A2 --against B1 B2"
    )
