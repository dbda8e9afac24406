"""Options that several verbs share, and the checks that go with them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import UsageError
from stepscope.measure.settings import STEP_ON

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepscope.ui.loggers.metric_log import LogChoice

    Option = Callable[[Callable[..., Any]], Callable[..., Any]]

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."
)
step_on_option = click.option(
    "--step-on",
    type=click.Choice(STEP_ON),
    default="auto",
    show_default=True,
    help="What counts as the end of a training step.",
)


_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_budget(_context: Any, _parameter: Any, text: str) -> float:
    """10m, 90s, 1.5h or a number of seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([smh]?)(?:in)?", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"--budget {text!r}: write 10m, 90s or 1h")
    return seconds


def _remedies(_context: Any, _parameter: Any, text: str) -> tuple[str, ...]:
    """UsageError for a remedy that nothing has."""
    if not text:
        return ()
    from stepscope.fix.chosen import choose_all

    return tuple(map(str, choose_all(text.split(","))))


with_option = click.option(
    "--with",
    "remedies",
    default="",
    metavar="ID[,ID]",
    callback=_remedies,
    help="Apply these remedies inside the training, without touching the script (docs/remedies.md "
    "lists them).",
)


def _loggers(_context: Any, _parameter: Any, texts: tuple[str, ...]) -> tuple[LogChoice, ...]:
    """UsageError for a logger that there is not."""
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
    help="Log steps, verdict and budget while the command runs: tensorboard[:DIR], "
    "mlflow[:EXPERIMENT] or wandb[:PROJECT]. May be given several times.",
)
no_cache_option = click.option(
    "--no-cache",
    is_flag=True,
    help="Read the trace itself, not the copy kept from an earlier reading, and keep none.",
)


def top_option(default: int, most: int | None, help_text: str) -> Option:
    rows = click.IntRange(1, most)
    return click.option("--top", default=default, show_default=True, type=rows, help=help_text)


def out_option(help_text: str) -> Option:
    return click.option("--out", type=click.Path(path_type=Path, file_okay=False), help=help_text)


def wait_option(default: int, help_text: str) -> Option:
    return click.option(
        "--wait", default=default, show_default=True, type=click.IntRange(1), help=help_text
    )


def html_option(help_text: str) -> Option:
    return click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help=help_text)


def check_html(html: Path | None) -> None:
    """Before anything is measured."""
    _check_folder("--html", html)


def check_perfetto(perfetto: Path | None) -> None:
    """Before anything is read."""
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
