"""stepscope ab: run two commands in turns and compare their steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepscope.errors import UsageError
from stepscope.measure.settings import STEP_ON
from stepscope.ui.cli.compare import AB, check_promise, check_report, comparing_options, conclude
from stepscope.ui.say import say

if TYPE_CHECKING:
    from stepscope.verify.pairs import Turns

_BETWEEN = "---"


@click.command(
    name="ab",
    short_help="run two training commands in turns and compare their steps",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--pairs",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="How often to run each command.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    help="Seed of the random order: which command of a pair runs first.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for all runs (default: stepscope-runs/<time>-ab).",
)
@click.option(
    "--wait",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Steps to skip before the last pair's trace is recorded.",
)
@click.option("--no-trace", is_flag=True, help="Record no trace in the last pair, only step times.")
@click.option(
    "--step-on",
    type=click.Choice(STEP_ON),
    default="auto",
    show_default=True,
    help="What counts as the end of a training step.",
)
@comparing_options
@click.argument("commands", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    pairs: int,
    seed: int,
    out: Path | None,
    wait: int,
    no_trace: bool,
    step_on: str,
    as_json: bool,
    html: Path | None,
    fail_on_slower: float | None,
    promise: str | None,
    no_promise: bool,
    top: int,
    commands: tuple[str, ...],
) -> None:
    """Run COMMAND_A --- COMMAND_B in turns (A B, B A, ...), then compare them pair by pair.

    Each must end by itself; some hundred steps a run are plenty. Their output goes to files.
    """
    from stepscope.verify.compare import compare
    from stepscope.verify.pairs import Turns, plan_pairs, read_pairs

    check_report(html)
    check_promise(promise, no_promise)
    a, b = _split(commands)
    turns = Turns(command_a=a, command_b=b, pairs=plan_pairs(pairs, seed), seed=seed)
    folder = _claim(out)
    _take_turns(turns, folder, step_on, None if no_trace else wait)
    found = compare(*read_pairs(folder), paired=True)
    conclude(
        found,
        as_json=as_json,
        html=html,
        fail_on_slower=fail_on_slower,
        promise=promise,
        no_promise=no_promise,
        top=top,
    )


def _split(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if words.count(_BETWEEN) != 1:
        raise UsageError(
            f"two commands with {_BETWEEN} between them: "
            f"stepscope ab -- python a.py {_BETWEEN} python b.py"
        )
    place = words.index(_BETWEEN)
    a, b = words[:place], words[place + 1 :]
    if not a or not b:
        raise UsageError(f"there is no command {'before' if not a else 'behind'} {_BETWEEN}")
    for command in (a, b):
        _check_command(command)
    return a, b


def _check_command(command: tuple[str, ...]) -> None:
    """Before the other one has run for nothing."""
    from shutil import which

    word = command[0]
    if which(word) is not None:
        return
    if re.match(r"[A-Za-z_]\w*=", word):
        raise UsageError(
            f"{word}: no such command; to set a variable for one of them: env {shlex.join(command)}"
        )
    raise UsageError(f"{word}: no such command")


def _claim(out: Path | None) -> Path:
    from stepscope.measure import folder as layout

    try:
        if out is None:
            return layout.new_run_folder("ab")
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"{out} is not empty: a run folder is never written over")
    except OSError as error:
        raise UsageError(f"the run folder cannot be made: {error}") from None
    return out


def _take_turns(turns: Turns, folder: Path, step_on: str, window: int | None) -> None:
    """Every pair that is finished is written down at once: `compare FOLDER` reads what is there."""
    from msgspec import structs

    from stepscope.ui.ab_runner import capture_turn

    _write(turns, folder)
    say(f"run folder {folder}")
    done = list(turns.pairs)
    for number, pair in enumerate(turns.pairs):
        last = number == len(turns.pairs) - 1
        for side in (pair.first, "b" if pair.first == "a" else "a"):
            words = turns.command_a if side == "a" else turns.command_b
            say(f"pair {number + 1} of {len(turns.pairs)}, {side.upper()}: {shlex.join(words)}")
            capture_turn(
                words,
                folder / (pair.a if side == "a" else pair.b),
                step_on=step_on,
                window=window if last else None,
            )
        done[number] = structs.replace(pair, done=True)
        _write(structs.replace(turns, pairs=tuple(done)), folder)


def _write(turns: Turns, folder: Path) -> None:
    import msgspec

    file = folder / AB
    temporary = file.with_name(f".{AB}.tmp")
    temporary.write_bytes(msgspec.json.encode(turns))
    temporary.replace(file)
