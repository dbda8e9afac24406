"""stepscope lsp: show what each line of a script costs, in an editor."""

from __future__ import annotations

from importlib import import_module

import click

from stepscope.errors import UsageError
from stepscope.ui.cli.options import VerbCommand


@click.command(
    cls=VerbCommand,
    name="lsp",
    examples=(
        ("stepscope lsp", "What an editor starts: a server on standard input and output"),
        ("stepscope lsp --tcp 8765", "Wait for one editor on a port of this machine"),
    ),
)
@click.option("--stdio", is_flag=True, help="Use standard input and output (the default).")
@click.option(
    "--tcp",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Wait for one editor on this port of 127.0.0.1 instead.",
)
def command(stdio: bool, tcp: int | None) -> None:
    """Show what each line of a training script costs, in an editor.

    Editors start this language server themselves. It runs no training before you ask for a profile.
    """
    if stdio and tcp is not None:
        raise UsageError("choose one of --stdio and --tcp")
    try:
        # By name, as verbs are loaded: the server explains through ui.api, which imports verbs.
        server = import_module("stepscope.ui.lsp.serve_editor")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("pygls", "lsprotocol"):
            raise
        raise UsageError(
            f"`stepscope lsp` needs {error.name}: pip install 'stepscope[editor]'"
        ) from None
    if tcp is not None:
        server.serve_tcp(tcp)
    server.serve_stdio()
