"""Capture a training that Ray runs: what its workers need, and the run folder around it.

with stepscope.ray.capture("runs/bert") as run:
    config = RunConfig(worker_runtime_env=run.runtime_env)
    TorchTrainer(train, run_config=config, ...).fit()

Ray itself is not imported. `ray.init(runtime_env=run.runtime_env)` captures all workers of a job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from stepscope.errors import StepscopeError, UsageError
from stepscope.measure.folder import why_refused
from stepscope.measure.settings import Settings
from stepscope.ui.jobs.environment import capture_variables
from stepscope.ui.jobs.run_folder import RunFile, claim
from stepscope.ui.say import say

__all__ = ["RayCapture", "capture"]

_VARIABLES = "env_vars"
# Ray puts the variable's value on the worker's own node here.
_WORKERS_PATH = "${PYTHONPATH}"


def capture(
    out: str | os.PathLike[str] | None = None,
    *,
    runtime_env: Mapping[str, Any] | None = None,
    **options: Any,
) -> RayCapture:
    """Open a run folder on a disk that all nodes share (default: stepscope-runs/<time>-<script>).

    `runtime_env` is your own, which is kept; options are those of `stepscope run` (wait, active,
    ...). Under `stepscope run` its folder and options are used. UsageError if `out` is in use.
    """
    theirs = dict(runtime_env or {})
    outer = Settings.from_environment()
    if outer is not None:
        return RayCapture(Path(outer.folder), _with_capture(theirs, outer), None)
    command = tuple(sys.orig_argv) or ("python",)
    try:
        claimed = claim(Path(out).absolute() if out is not None else None, command)
        settings = _settings(claimed.path.absolute(), options)
        run = RunFile.begin(claimed.path.absolute(), command, settings)
    except OSError as error:
        say(f"nothing is captured: {error.filename or out}: {why_refused(error)}")
        return RayCapture(None, theirs, None)
    return RayCapture(run.folder, _with_capture(theirs, settings), run)


@dataclass(slots=True)
class RayCapture:
    """`folder` is the run folder: None if it could not be made, and nothing is captured."""

    folder: Path | None
    runtime_env: dict[str, Any]  # for ray.init, RunConfig(worker_runtime_env=...) or an actor
    _run: RunFile | None = field(repr=False)  # None if another process closes the folder

    def finish(self, exit_code: int = 0) -> None:
        """The training has ended: close the run folder. Further calls do nothing."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            ranks = run.close(exit_code)
        except (OSError, StepscopeError) as error:
            say(f"the run folder could not be closed: {error}")
            return
        if not ranks:
            say(
                "nothing was captured: no worker ended a training step with this runtime_env. "
                "Pass it to ray.init, RunConfig(worker_runtime_env=...) or the actors that train. "
                "All nodes need stepscope at the same path, and the run folder on a shared disk"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(0 if kind is None else 1)


def _settings(folder: Path, options: dict[str, Any]) -> Settings:
    try:
        return Settings(folder=str(folder), **options)
    except TypeError as error:
        raise UsageError(f"stepscope.ray.capture: {error}") from None


def _with_capture(runtime_env: dict[str, Any], settings: Settings) -> dict[str, Any]:
    theirs = dict(runtime_env.get(_VARIABLES) or {})
    path = theirs.get("PYTHONPATH", _WORKERS_PATH)
    return {**runtime_env, _VARIABLES: capture_variables(settings, {**theirs, "PYTHONPATH": path})}
