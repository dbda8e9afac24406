"""stepscope ab: run two commands in turns and compare their steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import UsageError
from stepscope.measure import folder as layout
from stepscope.ui.cli.compare import Ending, comparing_options, conclude
from stepscope.ui.cli.options import (
    command_argument,
    count_option,
    flag,
    out_option,
    step_on_option,
    verb,
    wait_option,
)
from stepscope.ui.jobs.run_folder import claim_or_refuse
from stepscope.ui.say import say

if TYPE_CHECKING:
    from stepscope.verify.runs import PairedRuns

_SEPARATOR = "---"


@verb(
    "ab",
    examples=(
        ("stepscope ab -- python a.py --- python b.py", "Compare two scripts, five runs each"),
        (
            "stepscope ab --fail-on-slower 3% -- python train.py --- python train.py --amp",
            "Exit with code 5 if the second command is more than 3% slower",
        ),
    ),
    groups={
        "The runs": "--pairs --seed --out --step-on --wait --no-trace",
        "Predictions": "--prediction --no-prediction",
        "Output": "--json --html --top --fail-on-slower",
    },
    takes_command=True,
)
@count_option("--pairs", "How many times to run each command.", default=5)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    help="Decides which command of each pair runs first.",
)
@out_option("Folder for all runs (default: stepscope-runs/<time>-ab).")
@wait_option(10, "Steps to skip before the last pair's trace is recorded.")
@flag("--no-trace", "Record no trace in the last pair, only step times.")
@step_on_option
@comparing_options
@command_argument(name="commands", metavar="COMMAND_A --- COMMAND_B")
def command(
    pairs: int,
    seed: int,
    out: Path | None,
    wait: int,
    no_trace: bool,
    step_on: str,
    commands: tuple[str, ...],
    **answer: Any,
) -> None:
    """Run two commands in turns, then compare their steps pair by pair.

    The words are COMMAND_A --- COMMAND_B. Each command must end by itself. A few hundred steps per
    run are enough. Their output goes to files.
    """
    from stepscope.verify.compare import compare
    from stepscope.verify.runs import PairedRuns, plan_pairs, read_pairs

    ending = Ending(**answer)
    ending.check()
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
    conclude(compare(*read_pairs(folder), paired=True), ending)


def _split(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return both commands. Raise UsageError before the first one runs for nothing."""
    from shutil import which

    if words.count(_SEPARATOR) != 1:
        raise UsageError(
            f"ab takes two commands with {_SEPARATOR} between them: "
            f"stepscope ab -- python a.py {_SEPARATOR} python b.py"
        )
    middle = words.index(_SEPARATOR)
    a, b = words[:middle], words[middle + 1 :]
    if not a or not b:
        raise UsageError(f"there is no command {'before' if not a else 'after'} {_SEPARATOR}")
    for command in (a, b):
        if which(command[0]) is None:
            is_variable = re.match(r"[A-Za-z_]\w*=", command[0])
            hint = f"; to set a variable for one of them: env {shlex.join(command)}"
            raise UsageError(f"{command[0]}: no such command{hint if is_variable else ''}")
    return a, b


def _run_pairs(plan: PairedRuns, folder: Path, step_on: str, window: int | None) -> None:
    """Write ab.json after every pair, so that `compare FOLDER` reads what is finished."""
    from msgspec import json, structs

    from stepscope.ui.jobs.capture import capture_run
    from stepscope.verify.runs import AB

    def save() -> None:
        with layout.replacing(folder / AB) as unfinished:
            unfinished.write_bytes(json.encode(plan))

    save()
    say(f"run folder {folder}")
    for number, pair in enumerate(plan.pairs):
        last = number == len(plan.pairs) - 1
        for side in (pair.first, "b" if pair.first == "a" else "a"):
            words = plan.command_a if side == "a" else plan.command_b
            say(f"pair {number + 1} of {len(plan.pairs)}, {side.upper()}: {shlex.join(words)}")
            run = folder / (pair.a if side == "a" else pair.b)
            capture_run(words, run, step_on=step_on, window=window if last else None)
        pairs = (*plan.pairs[:number], structs.replace(pair, done=True), *plan.pairs[number + 1 :])
        plan = structs.replace(plan, pairs=pairs)
        save()
