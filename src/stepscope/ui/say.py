"""One line of ours on stderr, so that a command's own output stays its own."""

from __future__ import annotations

import click

from stepscope.ui.words import printable


def say(message: str) -> None:
    """Names in it come from files and commands: they are printed as text."""
    click.echo(f"stepscope: {printable(message)}", err=True)
