"""stepscope lsp: show what each line of a script costs, in an editor."""

from __future__ import annotations

from importlib import import_module

from stepscope.errors import UsageError
from stepscope.ui.cli.options import count_option, flag, verb


@verb(
    "lsp",
    examples=(
        ("stepscope lsp", "What an editor starts: a server on standard input and output"),
        ("stepscope lsp --tcp 8765", "Wait for one editor on a port of this machine"),
    ),
)
@flag("--stdio", "Use standard input and output (the default).")
@count_option(
    "--tcp",
    "Wait for one editor on this port of 127.0.0.1 instead.",
    most=65535,
    metavar="PORT",
)
def command(stdio: bool, tcp: int | None) -> None:
    """Show what each line of a training script costs, in an editor.

    Editors start this language server themselves. It runs no training before you ask for a profile.
    """
    if stdio and tcp is not None:
        raise UsageError("choose one of --stdio and --tcp")
    try:
        server = import_module("stepscope.ui.lsp.serve_editor")  # by name, as verbs are loaded
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("pygls", "lsprotocol"):
            raise
        raise UsageError(
            f"`stepscope lsp` needs {error.name}: pip install 'stepscope[editor]'"
        ) from None
    if tcp is not None:
        server.serve_tcp(tcp)
    server.serve_stdio()
