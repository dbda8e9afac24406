"""The verbs. Each is imported only when it is called, so that --help stays instant."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from stepscope import __version__
from stepscope.ui.say import leave_quietly

if TYPE_CHECKING:
    from collections.abc import Iterator

VERBS = {
    "run": "capture an unmodified training command, then explain it",
    "top": "show a run live in a terminal, while it trains",
    "serve": "show a folder of runs in a browser of this machine",
    "explain": "show where each training step's time went",
    "gather": "copy the parts of one job from several hosts into one run folder",
    "whatif": "predict what a change would save, before anybody makes it",
    "gpus": "predict a recorded step on other GPUs, side by side",
    "compare": "tell whether B's step really differs from A's, with an interval",
    "ab": "run two training commands alternately and compare their steps",
    "tune": "try remedies in short runs of a command, keep what wins",
    "sweep": "train a model with many settings, several at a time as one",
    "bench": "run a suite of training workloads, by fixed rules",
    "probe": "time the operators of a step on this device, one by one",
    "library": "show, export or import the operator times that probes measured",
    "record": "list what was promised and what was measured afterwards",
    "health": "start a training command, check three steps, stop it",
    "lsp": "show what each line of a script costs, in an editor",
    "demo": "train a small model here, in two processes, and explain it",
    "calibrate": "measure how fast this machine can be: matmuls, collectives",
    "doctor": "check what works on this machine",
}


_SHORT = frozenset({"explain", "whatif", "gpus", "compare", "record", "library"})


@contextlib.contextmanager
def _closed_output_ends_quietly() -> Iterator[None]:
    """Click would end with exit code 1."""
    try:
        yield
    except BrokenPipeError:
        leave_quietly()


def _meant(words: list[str]) -> str:
    """What the user probably wants who named no verb."""
    import shlex
    from difflib import get_close_matches
    from pathlib import Path

    first = Path(words[0])
    if first.suffix == ".py" or words[0] == "python":
        return f"To capture a training: stepscope run -- {shlex.join(words)}"
    if first.is_dir() or (first.is_file() and not os.access(first, os.X_OK)):
        return f"To explain a trace or a run folder: stepscope explain {shlex.join(words)}"
    near = get_close_matches(words[0], VERBS, 1)
    return f"Did you mean {near[0]}?" if near else ""


class _Verbs(click.Group):
    """Loads `stepscope.ui.cli.<verb>` on demand; help lines come from VERBS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in VERBS:
            return None
        if cmd_name in _SHORT:
            # They make few reference cycles; searching for them takes a seventh of a short run.
            gc.disable()
            atexit.register(gc.freeze)
        command: click.Command = import_module(f"stepscope.ui.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}. {_meant(args)}".rstrip())
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _closed_output_ends_quietly():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _closed_output_ends_quietly():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stepscope")
def cli() -> None:
    """Where each training step went, what to change, what it buys, and proof."""
