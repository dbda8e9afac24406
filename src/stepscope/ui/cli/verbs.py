"""Start the command line; each verb is imported only when it is called. Every error ends here."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from stepscope import __version__
from stepscope.errors import StepscopeError
from stepscope.ui.cli.options import COMPLETE, HELP_NAMES
from stepscope.ui.front_page import NEWER, SUMMARY, VERBS, WIDEST_HELP, front_page
from stepscope.ui.jobs.environment import without_blas_threads
from stepscope.ui.say import leave_quietly, say

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_SHORT = frozenset({"explain", "whatif", "gpus", "compare", "record", "library", "why"})
# What people call a verb elsewhere.
_MEANT = {
    "capture": "run",
    "profile": "run",
    "trace": "run",
    "train": "run",
    "report": "explain",
    "analyze": "explain",
    "show": "explain",
    "predict": "whatif",
    "what-if": "whatif",
    "history": "whatif --history",
    "optimize": "tune",
    "diff": "compare",
    "watch": "top",
    "live": "top",
    "finding": "why",
    "version": "--version",
}


@contextlib.contextmanager
def _closed_output_ends_quietly() -> Iterator[None]:
    """Leave with our exit code where click would leave with 1."""
    try:
        yield
    except BrokenPipeError:
        leave_quietly()


def _meant(words: Sequence[str]) -> str:
    """Return what the user probably wants who named no verb."""
    import shlex
    from difflib import get_close_matches
    from pathlib import Path

    first = Path(words[0])
    if first.suffix == ".py" or words[0] == "python":
        return f"To run a training: stepscope run -- {shlex.join(words)}"
    if first.is_dir() or (first.is_file() and not os.access(first, os.X_OK)):
        return f"To explain a trace or a run folder: stepscope explain {shlex.join(words)}"
    if words[0] in _MEANT:
        return f"Did you mean {_MEANT[words[0]]}?"
    if near := get_close_matches(words[0], VERBS, 1):
        return f"Did you mean {near[0]}?"
    if words[0] in import_module("stepscope.ui.cli.why").finding_ids():
        return f"To read about this finding: stepscope why {words[0]}"
    return "`stepscope --help` lists the commands."


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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:  # help VERB is VERB --help
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        unknown = args and args[0] not in VERBS and not args[0].startswith("-")
        if unknown and not ctx.resilient_parsing:
            from stepscope.ui.words import one_line

            ctx.fail(f"No such command {args[0]!r}. {one_line(_meant(args))}".rstrip())
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _closed_output_ends_quietly():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _closed_output_ends_quietly():
            return super().invoke(ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete verbs without importing any of them."""
        from click.shell_completion import CompletionItem

        names = [name for name in VERBS if name not in NEWER and name.startswith(incomplete)]
        items = [CompletionItem(name, help=VERBS[name]) for name in names]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(front_page(ctx.command_path, formatter.width))


@click.group(
    cls=_Verbs,
    help=SUMMARY,
    context_settings={"help_option_names": [*HELP_NAMES], "max_content_width": WIDEST_HELP},
)
@click.version_option(__version__, "-V", "--version", prog_name="stepscope")
def cli() -> None:
    """Hold the verbs."""


def main() -> None:
    """Run a verb; every error becomes one message and an exit code."""
    without_blas_threads()  # before any slow import
    try:
        code = cli.main(standalone_mode=False, complete_var=COMPLETE)
        if sys.stdout is not None:  # None if it was closed before we started
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        leave_quietly()
    except StepscopeError as error:
        say(*map(str, error.args or ("",)))
        sys.exit(error.exit_code)
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        say(
            f"a defect in stepscope: {type(error).__name__}: {error}",
            "set STEPSCOPE_DEBUG=1 to see where, and please report it",
        )
        sys.exit(1)
