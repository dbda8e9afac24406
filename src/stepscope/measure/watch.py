"""Library use: capture from inside a script, which says itself where steps end.

with stepscope.watch() as run:
    for batch in loader:
        train(batch)
        run.step()
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.measure.attached import attaching, detach
from stepscope.measure.folder import new_run_folder
from stepscope.measure.hooks import install
from stepscope.measure.session import Session
from stepscope.measure.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator


class WatchedRun:
    """What `watch` yields: call `step` after each step; `folder` is the run folder."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._session = session
        self.folder = folder

    def step(self) -> None:
        """A training step has ended."""
        self._session.step_ends()


@contextlib.contextmanager
def watch(
    folder: str | Path | None = None, *, step_on: str = "call", **options: Any
) -> Iterator[WatchedRun]:
    """Capture the steps inside. Options are those of `stepscope run` (wait, warmup, active, ...).

    Several ranks of one job must be given the same folder. With another `step_on`, steps are found
    as `stepscope run` finds them, and `step` need not be called. Afterwards torch is as before.
    """
    where = _folder(folder)
    with attaching() as attached:
        session = Session(Settings(folder=str(where), step_on=step_on, **options))
        install(session)
    try:
        yield WatchedRun(session, where)
    finally:
        session.close()
        detach(attached)
        atexit.unregister(session.close)


def _folder(given: str | Path | None) -> Path:
    """A folder that cannot be created ends the capture, not the training."""
    where = Path(given or ".")
    try:
        where = where if given is not None else new_run_folder(sys.argv[0] or "python")
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.stderr.write(f"stepscope: nothing is captured: {error}\n")
        return Path("/dev/null") / where.name
    return where


@contextlib.contextmanager
def region(name: str) -> Iterator[None]:
    """Name a stretch of the step: it appears in traces as an annotation."""
    import torch

    with torch.profiler.record_function(name):
        yield
