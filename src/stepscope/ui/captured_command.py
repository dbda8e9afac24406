"""Runs one command of `ab` or `tune` to its end and captures it into a run folder."""

from __future__ import annotations

import shlex
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stepscope
from stepscope.errors import NotCapturedError
from stepscope.measure import folder as layout
from stepscope.measure.settings import Settings
from stepscope.ui.command_to_end import OUTPUT, last_lines, run_to_end
from stepscope.ui.run_folder import describe_end, describe_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.ui.command_to_end import CommandEnd

NEVER = 1_000_000_000  # a step that no training reaches
_LAST_LINES = 5


def capture_run(command: Sequence[str], folder: Path, *, step_on: str, window: int | None) -> None:
    """Run it to its end into a new run folder; raises NotCapturedError if it failed or had no step.

    Only steps are captured; with `window`, also memory and a trace after that many steps.
    """
    settings = Settings(
        folder=str(folder.absolute()),
        wait=NEVER if window is None else window,
        memory=window is not None,
        sample_hz=0.0,
        step_on=step_on,
    )
    end, ranks = capture_to_end(command, folder, settings)
    _check(command, folder, end.code, ranks)


def capture_to_end(
    command: Sequence[str],
    folder: Path,
    settings: Settings,
    *,
    limit_s: float | None = None,
    enough: Callable[[], bool] | None = None,
) -> tuple[CommandEnd, list[dict[str, Any]]]:
    """Into a new run folder; also what each rank left. If stepscope is interrupted meanwhile, the
    folder is removed."""
    folder.mkdir(parents=True)
    began = time.time()
    try:
        end = run_to_end(command, settings, folder, limit_s=limit_s, enough=enough)
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    ranks = describe_ranks(folder, settings)
    if settings.wait == NEVER:
        for rank in ranks:
            rank["missing"] = {layout.TRACE: "only steps were captured"}
    layout.write_json(folder / layout.RUN, _run_json(command, settings, began, end.code, ranks))
    return end, ranks


def _run_json(
    command: Sequence[str], settings: Settings, began: float, code: int, ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    """run.json as `run` writes it."""
    return {
        "schema": layout.SCHEMA,
        "stepscope": stepscope.__version__,
        "command": list(command),
        "folder": str(Path.cwd()),
        "started_unix": began,
        "step_on": settings.step_on,
        "remedies": list(settings.remedies),
        **describe_end(code, ranks),
    }


def _check(command: Sequence[str], folder: Path, code: int, ranks: list[dict[str, Any]]) -> None:
    output = folder / OUTPUT
    if code:
        raise NotCapturedError(
            f"{shlex.join(command)} ended with exit code {code}: nothing was compared. "
            f"Its output is in {output}{_tail(folder)}"
        )
    if not ranks:
        raise NotCapturedError(
            f"{shlex.join(command)}: no training step was seen. If it trains without a torch "
            f"optimizer, try --step-on dataloader (or forward). Its output is in {output}"
        )


def _tail(folder: Path) -> str:
    return "".join(f"\n  {line}" for line in last_lines(folder, _LAST_LINES))
