"""Run a command with capture: open the run folder, watch the command, close the folder."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from stepscope.errors import UsageError
from stepscope.ui.attachment import Attachment
from stepscope.ui.job_process import run_job
from stepscope.ui.run_folder import RunFile
from stepscope.ui.say import say

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepscope.measure.settings import Settings
    from stepscope.ui.job_part import JobPart
    from stepscope.ui.job_process import HeldSignals, News


def capture(
    command: tuple[str, ...],
    folder: Path,
    settings: Settings,
    *,
    output: int | None = None,
    until: Callable[[], bool] | None = None,
) -> tuple[int, list[dict[str, Any]]]:
    """For verbs that need a capture: UsageError if the run folder cannot be written."""
    try:
        run = RunFile.begin(folder, command, settings)
    except OSError as error:
        raise UsageError(f"the run folder cannot be written: {error}") from None
    return capture_into(run, command, settings, output=output, until=until)


def capture_into(
    run: RunFile | JobPart,
    command: tuple[str, ...],
    settings: Settings,
    *,
    output: int | None = None,
    until: Callable[[], bool] | None = None,
    announce: bool = False,
    signals: HeldSignals | None = None,
    around: Callable[[News | None], News] | None = None,
) -> tuple[int, list[dict[str, Any]]]:
    """The command's exit code and what each rank left; run.json holds both.

    Once `until` returns True, the command is ended, which is no failure. What `around` makes of
    the news is polled while the command runs.
    """
    attachment: News | None = Attachment(run.folder, settings, command) if announce else None
    if around is not None:
        attachment = around(attachment)
    job = partial(run_job, command, settings, output=output, until=until)
    try:
        code = job(news=attachment, diary=run, signals=signals)
    except UsageError:  # it could not be started
        run.discard()
        raise
    try:
        return code, run.close(code)
    except Exception as error:  # the command's exit code is not ours to change
        say(f"the run folder could not be closed: {type(error).__name__}: {error}")
        return code, []
