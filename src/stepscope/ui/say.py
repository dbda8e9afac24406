"""What we say on stderr, so that a command's own output stays its own."""

from __future__ import annotations

import contextlib
import os

import click

from stepscope.ui.words import one_line


def say(message: str, *more: str) -> None:
    """Names in it come from files and commands: they are printed as text, and `more` below it.

    Where nobody can read it, that is no failure of whatever had something to say.
    """
    text = "\n  ".join((f"stepscope: {one_line(message)}", *map(one_line, more)))
    try:
        click.echo(text, err=True)
    except OSError:
        # What is left in the buffer would fail again at the end, and change the exit code.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
