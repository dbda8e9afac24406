"""Capture from inside a script, which says itself where steps end, or through a callback of
a trainer that owns the loop.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stepscope.measure.folder import new_run_folder
from stepscope.measure.hooks import install
from stepscope.measure.never_raise import never_raise
from stepscope.measure.patches import attaching, detach
from stepscope.measure.session.session import Session
from stepscope.measure.settings import Settings

Beside = Callable[[Path], Callable[[], None]]

# with stepscope.watch() as run:
#     for batch in loader:
#         train(batch)
#         run.step()


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


# Thin callbacks for trainers that own the loop: they only say where steps end.
#
# Batches whose gradients accumulate for one optimizer step are one step.
#
# Trainer(..., callbacks=[stepscope.measure.watch.hugging_face("my-run")])
# lightning.Trainer(..., callbacks=[stepscope.measure.watch.lightning("my-run")])


class _Watching:
    """Opens the watch when training begins and closes it when training ends."""

    def __init__(
        self, folder: str | Path | None, options: dict[str, Any], beside: Beside | None = None
    ) -> None:
        self._folder, self._beside, self._options = folder, beside, options
        self._stack = contextlib.ExitStack()
        self._run: WatchedRun | None = None
        self._end_beside: Callable[[], None] | None = None

    @never_raise
    def begin(self) -> None:
        self._run = self._stack.enter_context(watch(self._folder, **self._options))
        if self._beside is not None:
            self._end_beside = self._beside(self._run.folder)

    def step(self) -> None:
        if self._run is not None:
            self._run.step()

    @never_raise
    def end(self) -> None:
        self._run = None
        self._stack.close()
        end_beside, self._end_beside = self._end_beside, None
        if end_beside is not None:
            end_beside()


def hugging_face(
    folder: str | Path | None = None, *, beside: Beside | None = None, **options: Any
) -> Any:
    """A transformers.TrainerCallback."""
    from transformers import TrainerCallback

    watching = _Watching(folder, options, beside)

    class StepscopeTrainerCallback(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watching.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watching.step()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            watching.end()

    return StepscopeTrainerCallback()


def lightning(
    folder: str | Path | None = None, *, beside: Beside | None = None, **options: Any
) -> Any:
    """A lightning Callback."""
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        from pytorch_lightning.callbacks import Callback

    watching = _Watching(folder, options, beside)

    class StepscopeLightningCallback(Callback):
        def on_train_start(self, trainer: Any, *_: Any, **__: Any) -> None:
            self._stepped = trainer.global_step
            watching.begin()

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any, **__: Any) -> None:
            # A module with manual optimization may step unseen: there every batch is a step.
            stepped, self._stepped = self._stepped, trainer.global_step
            if stepped != self._stepped or not module.automatic_optimization:
                watching.step()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            watching.end()

    return StepscopeLightningCallback()
