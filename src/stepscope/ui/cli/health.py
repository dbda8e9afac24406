"""stepscope health: start a training command, look at three steps of all ranks, end it."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import NotCapturedError, UsageError
from stepscope.measure import folder as layout
from stepscope.measure.schedule import Schedule
from stepscope.measure.settings import STEP_ON, Settings
from stepscope.records.words import counted
from stepscope.ui.capture import capture
from stepscope.ui.run_folder import claim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.ui.health import Health

_STEPS = 3


@click.command(
    name="health",
    short_help="start a training command, look at three steps of all ranks, end it",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the capture in this folder, for explain and whatif.",
)
@click.option(
    "--wait",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="Steps to skip before recording.",
)
@click.option(
    "--let-run",
    is_flag=True,
    help="Let the command run to its end instead of stopping it after three steps.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option(
    "--step-on",
    type=click.Choice(STEP_ON),
    default="auto",
    show_default=True,
    help="What counts as the end of a training step.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    out: Path | None,
    wait: int,
    let_run: bool,
    as_json: bool,
    step_on: str,
    command: tuple[str, ...],
) -> int:
    """Start COMMAND, record three steps of every rank, stop it, and say how it is doing.

    The command's own output goes to stderr. Its work is lost: use `run` for training that counts.
    """
    with _folder(out, command) as folder:
        settings = Settings(
            folder=str(folder.absolute()),
            wait=wait,
            warmup=1,
            active=_STEPS,
            sample_hz=0.0,
            step_on=step_on,
        )
        code, _ = capture(
            command,
            folder,
            settings,
            output=sys.stderr.fileno(),
            until=None if let_run else lambda: _all_seen(folder),
        )
        found = _look(folder, settings, code)
    _print(found, as_json)
    return code


@contextlib.contextmanager
def _folder(out: Path | None, command: tuple[str, ...]) -> Iterator[Path]:
    """The one that is named, or one that goes with the block."""
    with contextlib.ExitStack() as stack:
        try:
            folder = claim(out, command).path if out else _scratch(stack)
        except OSError as error:
            raise UsageError(
                f"no folder for the capture can be made: {error}; --out names another"
            ) from None
        yield folder


def _scratch(stack: contextlib.ExitStack) -> Path:
    made = tempfile.TemporaryDirectory(prefix="stepscope-health-", ignore_cleanup_errors=True)
    return Path(stack.enter_context(made))


def _all_seen(folder: Path) -> bool:
    """Every rank of the job has saved its trace and its memory."""
    places = list(folder.glob("rank-*"))
    wanted = (layout.TRACE, layout.MEMORY, layout.RANK)
    if not places or not all((place / name).exists() for place in places for name in wanted):
        return False
    return len(places) >= max(_facts(place).get("world_size") or 1 for place in places)


def _facts(place: Path) -> dict[str, Any]:
    from stepscope.trace.rank_facts import read_facts

    return read_facts(place)


def _look(folder: Path, settings: Settings, code: int) -> Health:
    from stepscope.explain.explain_job import explain_job
    from stepscope.trace.memory_file import read_memory
    from stepscope.ui.health import check_health

    places = sorted(folder.glob("rank-*"))
    if not any((place / layout.TRACE).exists() for place in places):
        needed = Schedule.plan(settings).windows[0].last + 1
        seen = max((_facts(place).get("steps") or 0 for place in places), default=0)
        raise NotCapturedError(
            f"the command ended with exit code {code} before {counted(needed, 'step')} were over "
            f"({seen} were seen): nothing can be said about its health"
        )
    explanation = explain_job(folder, cache=False)
    return check_health(
        explanation,
        [{**_facts(place), "memory": read_memory(place)} for place in places],
    )


def _print(found: Health, as_json: bool) -> None:
    if as_json:
        import msgspec

        from stepscope.ui.json_text import write_json

        told = {"schema": 1, **msgspec.to_builtins(found)}
        del told["lines"]
        write_json(told)
        return
    from stepscope.ui.terminal.health import print_health

    print_health(found)
