"""Capture a training cell in the notebook's own process, then explain its steps: the magic
%%stepscope.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from stepscope.errors import NotCapturedError, StepscopeError, UsageError
from stepscope.ui.jobs.run_folder import claim
from stepscope.ui.say import say

if TYPE_CHECKING:
    from stepscope.measure.watch import WatchedRun
    from stepscope.records.explanation import Explanation

# The cell runs as it would alone: its output, its value, its errors and the names it leaves are its
# own. Only plain HTML is shown, so that any frontend will do: no widget, no connection to the
# kernel.

MAGIC = "stepscope"
_NO_STEPS = (
    "no training step was seen in this cell. A step is a backward pass and an optimizer step; name "
    "what else ends one with --step-on"
)
_NO_TRACE = (
    "only {steps} seen, too few to record any. The default needs about 8; --wait 1 --warmup 1 "
    "--steps 1 needs 3"
)


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext stepscope` calls."""
    shell.register_magic_function(_Magic(shell), magic_kind="cell", magic_name=MAGIC)


def unload_ipython_extension(shell: Any) -> None:
    """What `%unload_ext stepscope` calls."""
    shell.magics_manager.magics["cell"].pop(MAGIC, None)


class _Magic:
    """Capture this cell's training steps. `%%stepscope --help` lists the options."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, line: str, cell: str) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out: errors are the cell's own
        options = self._parse(line)
        if options is None:
            return None
        with _capturing(options) as run:
            value = run_cell(self._shell, cell)
        if run is not None:
            self._show(run.folder, options)
        return value

    def _parse(self, line: str) -> argparse.Namespace | None:
        from IPython.core.error import UsageError as WrongUseError

        try:
            options = _parser().parse_args(shlex.split(line))
            _check(options)
            return options
        except SystemExit:  # --help was printed
            return None
        except (StepscopeError, ValueError) as error:
            raise WrongUseError(f"%%{MAGIC}: {error}") from None

    def _show(self, folder: Path, options: argparse.Namespace) -> None:
        """A failure here is told, and is not the cell's."""
        from IPython.display import display

        try:
            explanation = _explain(folder, options)
        except StepscopeError as error:
            say(f"nothing to show: {error}")
            return
        except Exception as error:
            say(f"{folder} could not be explained: {type(error).__name__}: {error}")
            return
        if options.name:
            self._shell.user_ns[options.name] = explanation
        display(explanation)
        report = f"; report {options.html}" if options.html else ""
        click.echo(f"stepscope: run folder {folder}{report}")


def _check(options: argparse.Namespace) -> None:
    """UsageError before the cell runs; a disk that refuses is told when nothing is captured."""
    from stepscope.ui.user_input import require_folder

    require_folder(options.html, "--html")
    if options.name and not options.name.isidentifier():
        raise UsageError(f"--name {options.name}: not a variable name")
    if options.out:
        with contextlib.suppress(OSError):
            claim(options.out, [MAGIC])


@contextlib.contextmanager
def _capturing(options: argparse.Namespace) -> Iterator[WatchedRun | None]:
    """None if nothing can be captured: the cell runs all the same."""
    with contextlib.ExitStack() as stack:
        try:
            run = stack.enter_context(_watch(options))
        except Exception as error:
            say(f"nothing is captured: {type(error).__name__}: {error}")
            run = None
        yield run


def _watch(options: argparse.Namespace) -> contextlib.AbstractContextManager[WatchedRun]:
    import torch  # noqa: F401  (the cell needs it, and hooks attach to it)

    from stepscope.measure.folder import new_run_folder
    from stepscope.measure.never_raise import forget_problems
    from stepscope.measure.watch import watch

    forget_problems()
    return watch(
        options.out or new_run_folder("notebook"),
        step_on=options.step_on,
        wait=options.wait,
        warmup=options.warmup,
        active=options.steps,
        stacks=options.stacks,
        modules=options.modules,
        memory=not options.no_memory,
    )


def _explain(folder: Path, options: argparse.Namespace) -> Explanation:
    from stepscope.text.words import counted
    from stepscope.ui.api import explain, write_report

    steps, traced = _captured(folder)
    if not steps:
        raise NotCapturedError(_NO_STEPS)
    if not traced:
        raise NotCapturedError(_NO_TRACE.format(steps=f"{counted(steps, 'step')}"))
    explanation = explain(folder)
    if options.html:
        write_report(explanation, options.html)
    return explanation


def _captured(folder: Path) -> tuple[int, bool]:
    """Steps of all ranks, and whether any has a trace."""
    from stepscope.measure.folder import TRACE, captured_parts
    from stepscope.trace.run_folder.follow_run import RunFollower

    ranks = RunFollower(folder).read().ranks
    traced = any(TRACE in captured_parts(path) for path in folder.glob("rank-*"))
    return sum(rank.steps.seen for rank in ranks), traced


class _OneLineParser(argparse.ArgumentParser):
    """Wrong options are an error of one line, not the end of the kernel."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; %%{MAGIC} --help lists the options")


def _parser() -> argparse.ArgumentParser:
    from stepscope.records.folders import STEP_ON

    parser = _OneLineParser(prog=f"%%{MAGIC}", description="Capture this cell's training steps.")
    add = parser.add_argument
    add("--steps", type=_whole(1), default=3, metavar="N", help="steps to record (default 3)")
    add("--warmup", type=_whole(0), default=2, metavar="N", help="steps to profile and throw away")
    add("--wait", type=_whole(0), metavar="N", help="steps to skip before that")
    add("--name", metavar="NAME", help="also keep the explanation in this variable")
    add("--out", type=Path, metavar="DIR", help="the run folder (default: stepscope-runs/...)")
    add("--html", type=Path, metavar="FILE", help="also write the whole report")
    add("--stacks", action="store_true", help="record Python stacks: findings name your lines")
    add("--modules", action="store_true", help="record nn.Module names")
    add("--no-memory", action="store_true", help="do not measure memory by category")
    add("--step-on", choices=STEP_ON, default="auto", help="what ends a training step")
    return parser


def _whole(least: int) -> Any:
    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    parse.__name__ = "whole number"
    return parse


# Run a cell's code in the notebook's namespace, as the cell alone would have run.


def run_cell(shell: Any, cell: str) -> Any:
    """Returns the value of a last expression, for IPython to show. Lines with % and ! work; await
    outside a function does not."""
    __tracebackhide__ = True  # IPython leaves this frame out: errors are the cell's own
    source = shell.transform_cell(cell)
    name = shell.compile.cache(source, raw_code=cell)  # tracebacks show the cell's lines
    tree = shell.transform_ast(shell.compile.ast_parse(source, filename=name))
    statements, value = tree.body, None
    if statements and isinstance(statements[-1], ast.Expr):
        *statements, value = statements
    _execute(shell, ast.Module(statements, tree.type_ignores), name, "exec")
    return _execute(shell, ast.Expression(value.value), name, "eval") if value else None


def _execute(shell: Any, tree: ast.AST, name: str, mode: str) -> Any:
    __tracebackhide__ = True
    return eval(shell.compile(tree, name, mode), shell.user_global_ns, shell.user_ns)
