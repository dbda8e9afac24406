"""What takes long, behind plain calls: each blocks its thread, and does the work in a child."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import NotCapturedError
from stepscope.ui.lsp.measured_run import MeasuredRun  # noqa: TC001  (msgspec reads the types)
from stepscope.ui.own_python import own_python

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping
    from pathlib import Path

    from stepscope.records.line_costs import LineCosts
    from stepscope.ui.editor.profile_child import ProfiledScript
    from stepscope.ui.lsp.editor_settings import EditorSettings

READ_LIMIT_S = 120.0
_LOOK_S = 0.2
_LAST_CHARACTERS = 300


class StoppedError(Exception):
    """Somebody asked for it, or newer work replaces this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptWork:
    """One script, as it is to be run."""

    script: Path
    arguments: tuple[str, ...]
    settings: EditorSettings


class _Answer(msgspec.Struct, frozen=True):
    run: MeasuredRun | None = None
    failed: str | None = None


class WorkRoom:
    """The real one; tests use others."""

    def profile(self, work: ScriptWork, folder: Path, stop: threading.Event) -> ProfiledScript:
        """Train for a few steps in a child, into `folder`."""
        from stepscope.ui.editor.profile_script import profile_script

        return profile_script(
            work.script,
            work.arguments,
            limit_s=work.settings.limit_s,
            folder=folder,
            python=work.settings.python,
            stop=stop,
        )

    def estimate(
        self,
        work: ScriptWork,
        texts: Mapping[Path, str],
        measured: LineCosts,
        stop: threading.Event,
    ) -> LineCosts:
        """What the edited lines will cost, without training; StepscopeError says why not."""
        from stepscope.ui.editor.estimate import estimate_script

        return estimate_script(
            work.script,
            texts,
            work.arguments,
            limit_s=work.settings.limit_s,
            measured=measured,
            python=work.settings.python,
            stop=stop,
        )

    def read(self, run: Path, script: Path, stop: threading.Event) -> MeasuredRun:
        """NotCapturedError if the run does not tell what lines cost."""
        command = own_python("stepscope.ui.lsp.read_run", str(run), str(script))
        output, errors = _run_child(command, f"{run} took too long to read", stop)
        try:
            answer = msgspec.json.decode(output, type=_Answer)
        except msgspec.DecodeError:
            raise NotCapturedError(f"{run} could not be read: {errors}") from None
        if answer.run is None:
            raise NotCapturedError(answer.failed or f"{run} could not be read")
        return answer.run

    def write_report(self, run: Path, report: Path, stop: threading.Event) -> None:
        """NotCapturedError if it cannot be written."""
        command = own_python("stepscope", "explain", str(run), "--html", str(report))
        _, errors = _run_child(command, f"the report of {run} took too long", stop)
        if not report.is_file():
            raise NotCapturedError(f"the report of {run} could not be written: {errors}")

    def close(self) -> None:
        """End what waits for more work."""
        from stepscope.ui.editor.warm_python import end_warm_pythons

        end_warm_pythons()


def _run_child(command: list[str], too_long: str, stop: threading.Event) -> tuple[bytes, str]:
    """Its output, and the end of what it said on stderr."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        try:
            output, errors = _await_end(child, too_long, stop)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # its workers too
    return output, errors.decode(errors="replace").strip()[-_LAST_CHARACTERS:]


def _await_end(
    child: subprocess.Popen[bytes], too_long: str, stop: threading.Event
) -> tuple[bytes, bytes]:
    until = time.monotonic() + READ_LIMIT_S
    while True:
        try:
            return child.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            if stop.is_set():
                raise StoppedError from None
            if time.monotonic() > until:
                raise NotCapturedError(too_long) from None
