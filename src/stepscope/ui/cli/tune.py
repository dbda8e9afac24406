"""stepscope tune: try changes in short runs of the command, keep those that help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import NotCapturedError, StepscopeError, UsageError
from stepscope.ui.cli.options import (
    SIZE,
    TIME,
    command_argument,
    complete_change,
    count_option,
    flag,
    folder_option,
    json_option,
    out_option,
    print_applied_changes,
    step_on_option,
    verb,
)
from stepscope.ui.jobs.environment import startable
from stepscope.ui.jobs.run_folder import claim_or_refuse
from stepscope.ui.say import say

if TYPE_CHECKING:
    from stepscope.ui.cli.options import Option
    from stepscope.ui.tune.plan import Journal
    from stepscope.ui.tune.tuning import TuneEnd

_FEWEST_STEPS = 20
_OF_A_NEW_TUNE = ("steps", "only", "skip", "allow", "memory_limit", "out", "step_on")


def _changes_option(name: str, help_text: str) -> Option:
    def read(_context: Any, _parameter: Any, text: str) -> tuple[str, ...]:
        return tuple(name.strip() for name in text.split(",") if name.strip())

    return click.option(
        name,
        default="",
        callback=read,
        metavar="CHANGE[,CHANGE]",
        shell_complete=complete_change,
        help=help_text,
    )


@verb(
    "tune",
    examples=(
        ("stepscope tune -- python train.py", "Try all changes that fit, for ten minutes"),
        (
            "stepscope tune --only tf32,fused-optimizer --budget 5m -- python train.py",
            "Try two changes, for five minutes",
        ),
        ("stepscope tune --list", "List the changes that can be tried"),
    ),
    groups={
        "What to try": "--only --skip --allow --memory-limit --list",
        "How long": "--budget --steps --step-on --resume",
        "Output": "--out --json --quiet --apply",
    },
    takes_command=True,
)
@count_option(
    "--steps",
    "Fewest steps of each trial. A trial ends itself after them.",
    default=60,
    least=_FEWEST_STEPS,
)
@click.option(
    "--budget",
    default="10m",
    show_default=True,
    type=TIME,
    help="Time for all trials together, such as 90s, 10m or 1h.",
)
@_changes_option("--only", "Try only these changes.")
@_changes_option("--skip", "Do not try these changes.")
@click.option(
    "--allow",
    type=click.Choice(["bit-identical", "rounding", "random", "training"]),
    default="rounding",
    show_default=True,
    metavar="EFFECT",
    help="The largest effect of a change on the numbers: bit-identical, rounding, random "
    "or training.",
)
@click.option(
    "--memory-limit",
    type=SIZE,
    help="Keep no change that needs more memory per rank than this, such as 24GB.",
)
@folder_option(
    "--resume",
    "Resume the tune in this folder with its own options. Only --budget may change.",
)
@out_option("Folder for all trials (default: stepscope-runs/<time>-<script>).")
@step_on_option
@flag("--apply", "Write the changes into your files, if git can restore them.")
@flag("--list", "List the changes that can be tried.", "as_list")
@json_option
@flag("--quiet", "Print nothing while trials run.")
@command_argument(required=False)
@click.pass_context
def command(
    context: click.Context,
    /,
    resume: Path | None,
    apply: bool,
    as_list: bool,
    as_json: bool,
    quiet: bool,
    command: tuple[str, ...],
    **options: Any,
) -> int:
    """Try changes in short runs of a training command, and keep those that make it faster.

    Each trial runs the command for a few dozen steps with a change applied. A change is kept if it
    is faster beyond noise and the losses stay the same. Without --apply the script stays untouched.
    The command's output goes to files. Its work is lost, so use `run` for training that counts.
    """
    if as_list:
        print_applied_changes(as_json=as_json)
        return 0
    from stepscope.ui.progress import shown_trials
    from stepscope.ui.tune.patch import require_applicable
    from stepscope.ui.tune.tuning import tune

    if apply:
        require_applicable(command, Path.cwd())
    journal = _resume(context, resume, command) if resume else _begin(command, **options)
    with shown_trials(quiet=quiet) as progress:
        progress.news(f"tune folder {journal.folder}")
        end = tune(journal, progress)
    _print(end, journal.folder, as_json=as_json)
    if apply and not end.code:
        _apply(end)
    return end.code


def _begin(words: tuple[str, ...], *, out: Path | None, budget: float, **options: Any) -> Journal:
    if not words:
        raise UsageError("name the command to tune: stepscope tune -- python train.py")
    from stepscope.ui.tune.plan import TuneStart, WantedRemedies
    from stepscope.ui.tune.tuning import begin

    WantedRemedies.parse(options["only"], options["skip"], options["allow"])
    start = TuneStart(command=startable(words), folder=str(Path.cwd()), budget_s=budget, **options)
    folder = claim_or_refuse(out, ("tune", *words))
    try:
        return begin(start, folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from None


def _resume(context: click.Context, folder: Path, words: tuple[str, ...]) -> Journal:
    """Raise UsageError for another command, another working folder or other options."""
    from msgspec.structs import replace

    from stepscope.ui.tune.plan import Journal

    given = click.core.ParameterSource.COMMANDLINE
    for name in _OF_A_NEW_TUNE:
        if context.get_parameter_source(name) is given:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} cannot change when a tune is resumed: start a new tune")
    journal = Journal.resume(folder)
    start = journal.start
    if words and startable(words) != start.command:
        raise UsageError(f"--resume {folder}: it tunes another command: {' '.join(start.command)}")
    if start.folder != str(Path.cwd()):
        raise UsageError(
            f"--resume {folder}: resume it in the folder where it was started: {start.folder}"
        )
    if context.get_parameter_source("budget") is given:
        journal.start = replace(start, budget_s=context.params["budget"])
    return journal


def _print(end: TuneEnd, folder: Path, *, as_json: bool) -> None:
    """Write the report, then print the answer, which an error in the report must not hide."""
    from stepscope.ui.html.panes.tune import write_tune_report

    report = None
    try:
        report = write_tune_report(folder)
    except NotCapturedError:
        pass  # stopped before anything was measured
    except (StepscopeError, OSError) as error:
        say(f"the report could not be written: {error}")
    if as_json:
        import msgspec

        from stepscope.ui.json_text import write_json

        write_json(msgspec.to_builtins(end.result))
        return
    from stepscope.ui.terminal.tune import print_tune

    print_tune(end.result, folder, report)


def _apply(end: TuneEnd) -> None:
    """Write the kept changes; raise UsageError where git could not restore the files."""
    from stepscope.ui.tune.patch import apply_patch
    from stepscope.ui.tune.result import patch_of

    if end.facts is None or not end.result.kept:
        say("--apply: no change was kept, so no file is written")
        return
    for path in apply_patch(patch_of(end.result, end.facts)):
        say(f"changed {path}")
