"""Options that several verbs share, and the checks that go with them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import UsageError
from stepscope.measure.settings import STEP_ON
from stepscope.ui.cli.verb_command import listed, long_name
from stepscope.ui.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click.shell_completion import CompletionItem

    from stepscope.ui.loggers.metric_log import LogChoice

    Option = Callable[[Callable[..., Any]], Callable[..., Any]]

_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(ms|[smh]?)(?:in)?")


def parse_time(text: str, option: str, least: float = 0.0, most: float = float("inf")) -> float:
    """Return seconds for 10m, 90s, 1.5h, 500ms or a number of seconds. Raise UsageError."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} {text!r}: write 10m, 90s or 1h")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds <= 0 and not least:
        raise UsageError(f"{option} {text!r}: write 10m, 90s or 1h")
    if not least <= seconds <= most:
        limit = f"{least:g} s or more" if most == float("inf") else f"{least:g} to {most:g} s"
        raise UsageError(f"{option} {text!r} is not in the range: {limit}")
    return seconds


class _Time(click.ParamType):  # type: ignore[type-arg]
    """A duration."""

    name = "time"

    def __init__(self, least: float = 0.0, most: float = float("inf")) -> None:
        self._least, self._most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> float:
        del ctx
        if isinstance(value, (int, float)):
            return float(value)
        return parse_time(value, _named(param), self._least, self._most)


class _Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> int:
        del ctx
        return value if isinstance(value, int) else parse_size(value, _named(param))


def _named(param: click.Parameter | None) -> str:
    return long_name(param) if param is not None else "time"


TIME, SIZE = _Time(), _Size()
time_between = _Time

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."
)
step_on_option = click.option(
    "--step-on",
    type=click.Choice(STEP_ON),
    default="auto",
    show_default=True,
    metavar="EVENT",
    help=f"What marks the end of a training step: {listed(STEP_ON)}.",
)


def _remedies(ctx: click.Context, _parameter: Any, text: str) -> tuple[str, ...]:
    """Raise UsageError for a change that stepscope does not know; `list` prints all of them."""
    if not text or ctx.resilient_parsing:
        return ()
    if text == "list":
        from stepscope.ui.cli.change_lists import print_applied_changes

        print_applied_changes(as_json=False)
        ctx.exit()
    from stepscope.fix.chosen import choose_all

    return tuple(map(str, choose_all(text.split(","))))


def complete_change(_ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
    """Complete the last of several changes that commas separate."""
    from click.shell_completion import CompletionItem

    from stepscope.fix.remedies import FIXES

    before, comma, last = incomplete.rpartition(",")
    return [CompletionItem(f"{before}{comma}{name}") for name in FIXES if name.startswith(last)]


with_option = click.option(
    "--with",
    "remedies",
    default="",
    metavar="CHANGE[,CHANGE]",
    callback=_remedies,
    shell_complete=complete_change,
    help="Apply these changes inside the training. The script stays untouched. `--with list` "
    "lists them.",
)


def _loggers(_context: Any, _parameter: Any, texts: tuple[str, ...]) -> tuple[LogChoice, ...]:
    """Raise UsageError for an unknown logger."""
    if not texts:
        return ()
    from stepscope.ui.loggers.metric_log import LogChoice

    return tuple(map(LogChoice.parse, texts))


log_option = click.option(
    "--log",
    "logs",
    multiple=True,
    metavar="KIND[:WHERE]",
    callback=_loggers,
    help="Log steps, verdict and budget while the command runs. KIND is tensorboard[:DIR], "
    "mlflow[:EXPERIMENT] or wandb[:PROJECT]. Repeatable.",
)
no_cache_option = click.option(
    "--no-cache",
    is_flag=True,
    help="Read the trace files themselves, use no cached copy and write none.",
)


def top_option(default: int, most: int | None, help_text: str) -> Option:
    rows = click.IntRange(1, most)
    return click.option(
        "--top", default=default, show_default=True, type=rows, metavar="N", help=help_text
    )


def out_option(help_text: str, **settings: Any) -> Option:
    folder = click.Path(path_type=Path, file_okay=False)
    return click.option(
        "-o", "--out", metavar="FOLDER", help=help_text, **{"type": folder, **settings}
    )


def wait_option(default: int, help_text: str) -> Option:
    return click.option(
        "--wait",
        default=default,
        show_default=True,
        type=click.IntRange(1),
        metavar="N",
        help=help_text,
    )


def html_option(help_text: str) -> Option:
    return click.option(
        "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=help_text
    )


def complete_file(ctx: click.Context, _param: Any, incomplete: str) -> list[CompletionItem]:
    """Complete files, and the words that choose another verb."""
    from click.shell_completion import CompletionItem

    words = getattr(ctx.command, "modes", {})
    chosen = [CompletionItem(word) for word in words if incomplete and word.startswith(incomplete)]
    return [*chosen, CompletionItem(incomplete, type="file")]


def mode_option(flag: str, help_text: str) -> Option:
    """Return a flag that hands the other words to another verb; VerbCommand acts on it."""
    return click.option(flag, is_flag=True, expose_value=False, help=help_text)


def check_html(html: Path | None) -> None:
    """Raise UsageError before anything is measured."""
    _check_folder("--html", html)


def check_perfetto(perfetto: Path | None) -> None:
    """Raise UsageError before anything is read."""
    _check_folder("--perfetto", perfetto)


def _check_folder(option: str, file: Path | None) -> None:
    if file and not file.absolute().parent.is_dir():
        raise UsageError(f"{option} {file}: its folder does not exist")


@contextlib.contextmanager
def writing_html(html: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--html {html} could not be written: {error.strerror}") from None
