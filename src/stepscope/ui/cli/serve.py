"""stepscope serve: show a folder of runs in a browser."""

from __future__ import annotations

import contextlib
import html
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import click

from stepscope.errors import UsageError
from stepscope.ui.cli.options import count_option, flag, verb

_TOKEN = "STEPSCOPE_SERVE_TOKEN"
_SHORTEST_TOKEN = 16
_HOME = "stepscope-runs"


@verb(
    "serve",
    examples=(
        ("stepscope serve", "Serve the runs below stepscope-runs"),
        ("stepscope serve /data/runs --open", "Serve another folder and open a browser"),
    ),
)
@click.argument("runs_dir", required=False, type=click.Path(path_type=Path))
@count_option(
    "--port",
    "Port of 127.0.0.1 to listen on; 0 takes any free one (default: 8763).",
    least=0,
    most=65535,
    metavar="PORT",
)
@flag("--open", "Open the page in a browser.", "open_browser")
@flag("--rebuild", "Build the index anew from the run folders.")
def command(runs_dir: Path | None, port: int | None, open_browser: bool, rebuild: bool) -> None:
    """Show a folder of runs in a browser: list, reports, comparisons, predictions.

    RUNS_DIR holds run folders (default: stepscope-runs). The server listens on 127.0.0.1 and needs
    the token of the printed address. It only reads, except when you ask a running job to record.
    Ctrl-C stops it.
    """
    root = runs_dir or Path(_HOME)
    if not root.is_dir():
        missing = f"{root} is not a folder" if root.exists() else f"{root} does not exist"
        raise UsageError(missing, "name a folder that holds run folders: stepscope serve RUNS_DIR")
    try:
        from stepscope.ui.serve.app import make_app
    except ImportError as error:
        raise UsageError(
            f"serve needs {error.name}, which is not installed",
            "pip install 'stepscope[serve]' installs it",
        ) from None
    from stepscope.ui.serve.app import HOST, PORT, open_port, serve_until_stopped
    from stepscope.ui.serve.served_runs import ServedRuns

    token = _chosen_token()
    listener = open_port(PORT if port is None else port)
    number = listener.getsockname()[1]
    address = f"http://{HOST}:{number}/?token={quote(token)}"

    def announce() -> None:
        click.echo(f"serving {root} at {address}")
        click.echo("Ctrl-C stops it", err=True)
        if open_browser:
            click.launch(str(stack.enter_context(_leading_to(address))))

    served = ServedRuns.of_folder(root, rebuild=rebuild)
    app = make_app(served, token, cookie=f"stepscope-{number}")
    with contextlib.ExitStack() as stack:
        serve_until_stopped(app, listener, announce)
    click.echo("stopped", err=True)


@contextlib.contextmanager
def _leading_to(address: str) -> Iterator[Path]:
    """Make a page that only its owner can read: everybody can read a browser's command line."""
    address = html.escape(address)
    with tempfile.NamedTemporaryFile("w", prefix="stepscope-", suffix=".html") as file:
        file.write(
            f'<!doctype html><meta http-equiv="refresh" content="0;url={address}">'
            f'<a href="{address}">stepscope</a>'
        )
        file.flush()
        yield Path(file.name)


def _chosen_token() -> str:
    """Return a new token, or that of the environment, for programs that come back."""
    import secrets

    chosen = os.environ.get(_TOKEN)
    if chosen is None:
        return secrets.token_urlsafe(24)
    if len(chosen) < _SHORTEST_TOKEN or not chosen.isascii() or not chosen.isprintable():
        raise UsageError(f"{_TOKEN} needs at least {_SHORTEST_TOKEN} characters of plain text")
    return chosen
