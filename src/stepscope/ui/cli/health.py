"""stepscope health: start a training command, check three steps, stop it."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import NotCapturedError, UsageError
from stepscope.measure import folder as layout
from stepscope.measure.profiler.schedule import Schedule
from stepscope.measure.settings import Settings
from stepscope.text.words import counted
from stepscope.ui.cli.options import (
    command_argument,
    flag,
    json_option,
    out_option,
    step_on_option,
    verb,
    wait_option,
)
from stepscope.ui.jobs.capture import capture
from stepscope.ui.jobs.run_folder import claim_or_refuse

if TYPE_CHECKING:
    from stepscope.ui.terminal.health import Health

_STEPS = 3


@verb(
    "health",
    newer="stepscope run --check -- COMMAND",
    examples=(
        ("stepscope run --check -- python train.py", "Check three steps, then stop the training"),
        (
            "stepscope run --check --let-run -- python train.py",
            "Check three steps and let the training go on",
        ),
    ),
    takes_command=True,
)
@out_option("Keep the recording in this folder, for `explain` and `whatif`.")
@wait_option(3, "Steps to skip before recording.")
@flag(
    "--let-run",
    "Let the command run to its end. Without it, stepscope stops it after three steps.",
)
@json_option
@step_on_option
@command_argument()
def command(
    out: Path | None,
    wait: int,
    let_run: bool,
    as_json: bool,
    step_on: str,
    command: tuple[str, ...],
) -> int:
    """Check how a training command is doing after three steps, then stop it.

    The command's own output goes to stderr. Its work is lost, so use `run` for training that
    counts.
    """
    with _folder(out, command) as folder:
        where = str(folder.absolute())
        settings = Settings(
            folder=where, wait=wait, warmup=1, active=_STEPS, sample_hz=0.0, step_on=step_on
        )
        until = None if let_run else lambda: _all_captured(folder)
        code, _ = capture(command, folder, settings, output=sys.stderr.fileno(), until=until)
        health = _check(folder, settings, code)
    if as_json:
        import msgspec

        from stepscope.ui.json_text import write_json

        answer = {"schema": 1, **msgspec.to_builtins(health)}
        del answer["lines"]
        write_json(answer)
    else:
        from stepscope.ui.terminal.health import print_health

        print_health(health)
    return code


@contextlib.contextmanager
def _folder(out: Path | None, command: tuple[str, ...]) -> Iterator[Path]:
    """Yield the folder named by --out, or a temporary one."""
    if out:
        yield claim_or_refuse(out, command)
        return
    try:
        temporary = tempfile.TemporaryDirectory(
            prefix="stepscope-health-", ignore_cleanup_errors=True
        )
    except OSError as error:
        raise UsageError(
            f"cannot make a temporary folder: {error}; name a folder with --out"
        ) from None
    with temporary as name:
        yield Path(name)


def _all_captured(folder: Path) -> bool:
    """Return whether every rank of the job has saved its trace and its memory."""
    from stepscope.trace.run_folder.rank_facts import read_facts

    ranks = list(folder.glob("rank-*"))
    files = (layout.TRACE, layout.MEMORY, layout.RANK)
    if not ranks or not all((rank / name).exists() for rank in ranks for name in files):
        return False
    return len(ranks) >= max(read_facts(rank).get("world_size") or 1 for rank in ranks)


def _check(folder: Path, settings: Settings, code: int) -> Health:
    from stepscope.explain.explain_job import explain_job
    from stepscope.trace.run_folder.rank_facts import read_facts
    from stepscope.trace.run_folder.rank_folder import read_memory
    from stepscope.ui.terminal.health import check_health

    ranks = sorted(folder.glob("rank-*"))
    facts = [read_facts(rank) for rank in ranks]
    if not any((rank / layout.TRACE).exists() for rank in ranks):
        needed = Schedule.plan(settings).windows[0].last + 1
        seen = max((one.get("steps") or 0 for one in facts), default=0)
        raise NotCapturedError(
            f"the command ended with exit code {code} after {counted(seen, 'step')}; a check needs "
            f"{needed}"
        )
    memory = [{**one, "memory": read_memory(rank)} for one, rank in zip(facts, ranks, strict=True)]
    return check_health(explain_job(folder, cache=False), memory)
