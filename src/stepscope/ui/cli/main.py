"""stepscope: where each training step went, what to change, what it buys, and proof.

Verbs are imported only when they are called, so that --help stays instant. All errors end here.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from importlib import import_module

import click

from stepscope import __version__
from stepscope.errors import StepscopeError

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


def main() -> None:
    """Run a verb; turn every error into one message and its exit code."""
    # Nothing here multiplies large matrices; threads for that only cost start-up time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A verb makes few cycles; looking for them, and again at the end, is a seventh of a short run.
    gc.disable()
    atexit.register(gc.freeze)
    try:
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output left: leave quietly, as other tools do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except StepscopeError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        _say(
            f"a defect in stepscope: {type(error).__name__}: {error}\n"
            "  set STEPSCOPE_DEBUG=1 to see where, and please report it"
        )
        sys.exit(1)


def _say(message: str) -> None:
    click.echo(f"stepscope: {message}", err=True)
