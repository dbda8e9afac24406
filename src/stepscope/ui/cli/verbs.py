"""The verbs. Each is imported only when it is called, so that --help stays instant."""

from __future__ import annotations

from importlib import import_module

import click

from stepscope import __version__

VERBS = {
    "run": "capture an unmodified training command, then explain it",
    "explain": "where each training step's time went",
    "whatif": "what a change would buy, before anybody tries it",
    "compare": "did the step really change: A against B, with an interval",
    "ab": "run two training commands in turns and compare their steps",
    "record": "what was promised and what was delivered",
    "health": "start a training command, look at three steps of all ranks, end it",
    "demo": "train a small model here, in two processes, and explain it",
    "calibrate": "this machine's and its ranks' ceilings: matmuls, copies, collectives",
    "doctor": "what works on this machine and what does not",
}


class _Verbs(click.Group):
    """Loads `stepscope.ui.cli.<verb>` on demand; help lines come from VERBS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"stepscope.ui.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stepscope")
def cli() -> None:
    """Where each training step went, what to change, what it buys, and proof."""
