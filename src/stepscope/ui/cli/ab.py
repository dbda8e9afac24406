"""stepscope ab: run two commands in turns and compare their steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import UsageError
from stepscope.measure import folder as layout
from stepscope.ui.cli.compare import check_ending, comparing_options, conclude
from stepscope.ui.cli.options import (
    VerbCommand,
    complete_file,
    out_option,
    step_on_option,
    wait_option,
)
from stepscope.ui.jobs.run_folder import claim_or_refuse
from stepscope.ui.say import say

if TYPE_CHECKING:
    from stepscope.verify.runs import PairedRuns

_SEPARATOR = "---"


@click.command(
    cls=VerbCommand,
    name="ab",
    context_settings={"allow_interspersed_args": False},
    examples=(
        ("stepscope ab -- python a.py --- python b.py", "Compare two scripts, five runs each"),
        (
            "stepscope ab --fail-on-slower 3% -- python train.py --- python train.py --amp",
            "Exit with code 5 if the second command is more than 3% slower",
        ),
    ),
    option_groups=(
        ("The runs", ("--pairs", "--seed", "--out", "--step-on", "--wait", "--no-trace")),
        ("Predictions", ("--prediction", "--no-prediction")),
        ("Output", ("--json", "--html", "--top", "--fail-on-slower")),
    ),
)
@click.option(
    "--pairs",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="How many times to run each command.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    help="Decides which command of each pair runs first.",
)
@out_option("Folder for all runs (default: stepscope-runs/<time>-ab).")
@wait_option(10, "Steps to skip before the last pair's trace is recorded.")
@click.option("--no-trace", is_flag=True, help="Record no trace in the last pair, only step times.")
@step_on_option
@comparing_options
@click.argument(
    "commands",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="COMMAND_A --- COMMAND_B",
    shell_complete=complete_file,
)
def command(
    pairs: int,
    seed: int,
    out: Path | None,
    wait: int,
    no_trace: bool,
    step_on: str,
    commands: tuple[str, ...],
    **ending: Any,
) -> None:
    """Run two commands in turns, then compare their steps pair by pair.

    The words are COMMAND_A --- COMMAND_B. Each command must end by itself. A few hundred steps per
    run are enough. Their output goes to files.
    """
    from stepscope.verify.compare import compare
    from stepscope.verify.runs import PairedRuns, plan_pairs, read_pairs

    check_ending(**ending)
    a, b = _split(commands)
    plan = PairedRuns(command_a=a, command_b=b, pairs=plan_pairs(pairs, seed), seed=seed)
    folder = claim_or_refuse(out, ("ab",))
    try:
        _run_pairs(plan, folder, step_on, None if no_trace else wait)
    except OSError as error:
        raise UsageError(
            f"{error.filename or folder} could not be written: {layout.why_refused(error)}; "
            f"stepscope compare {folder} compares the pairs that are finished"
        ) from None
    conclude(compare(*read_pairs(folder), paired=True), **ending)


def _split(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if words.count(_SEPARATOR) != 1:
        raise UsageError(
            f"ab takes two commands with {_SEPARATOR} between them: "
            f"stepscope ab -- python a.py {_SEPARATOR} python b.py"
        )
    place = words.index(_SEPARATOR)
    a, b = words[:place], words[place + 1 :]
    if not a or not b:
        raise UsageError(f"there is no command {'before' if not a else 'after'} {_SEPARATOR}")
    for command in (a, b):
        _check_command(command)
    return a, b


def _check_command(command: tuple[str, ...]) -> None:
    """Raise UsageError before the first one runs for nothing."""
    from shutil import which

    word = command[0]
    if which(word) is not None:
        return
    if re.match(r"[A-Za-z_]\w*=", word):
        raise UsageError(
            f"{word}: no such command; to set a variable for one of them: env {shlex.join(command)}"
        )
    raise UsageError(f"{word}: no such command")


def _run_pairs(plan: PairedRuns, folder: Path, step_on: str, window: int | None) -> None:
    """Write ab.json after every pair, so that `compare FOLDER` reads what is finished."""
    from msgspec import structs

    from stepscope.ui.jobs.capture import capture_run

    _write(plan, folder)
    say(f"run folder {folder}")
    for number, pair in enumerate(plan.pairs):
        last = number == len(plan.pairs) - 1
        for side in (pair.first, "b" if pair.first == "a" else "a"):
            words = plan.command_a if side == "a" else plan.command_b
            say(f"pair {number + 1} of {len(plan.pairs)}, {side.upper()}: {shlex.join(words)}")
            capture_run(
                words,
                folder / (pair.a if side == "a" else pair.b),
                step_on=step_on,
                window=window if last else None,
            )
        finished = structs.replace(pair, done=True)
        pairs = (*plan.pairs[:number], finished, *plan.pairs[number + 1 :])
        plan = structs.replace(plan, pairs=pairs)
        _write(plan, folder)


def _write(plan: PairedRuns, folder: Path) -> None:
    import msgspec

    from stepscope.verify.runs import AB

    with layout.replacing(folder / AB) as unfinished:
        unfinished.write_bytes(msgspec.json.encode(plan))
