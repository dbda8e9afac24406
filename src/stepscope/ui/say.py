"""Messages on stderr, so that stdout holds a command's own output or our answer alone."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

import click

SAYS = "stepscope: "
_CLOSED_PIPE = 141  # what a shell reports for a program that SIGPIPE ended


def say(message: str, *more: str) -> None:
    """Print a message, with the lines of `more` indented below it.

    A closed stderr is no failure of the caller.
    """
    from stepscope.ui.words import one_line  # --help needs none of it

    text = "\n  ".join((f"{SAYS}{one_line(message)}", *map(one_line, more)))
    try:
        click.echo(text, err=True)
    except OSError:
        # The rest of the buffer would fail again at exit and change the exit code.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def leave_quietly() -> NoReturn:
    """End as other tools do when the reader of our output has left, as `| head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(_CLOSED_PIPE)
