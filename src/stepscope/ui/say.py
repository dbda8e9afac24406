"""What we say on stderr, so that a command's own output stays its own."""

from __future__ import annotations

import click

from stepscope.ui.words import one_line


def say(message: str, *more: str) -> None:
    """Names in it come from files and commands: they are printed as text, and `more` below it."""
    click.echo("\n  ".join((f"stepscope: {one_line(message)}", *map(one_line, more))), err=True)
