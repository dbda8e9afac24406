"""Thin callbacks for trainers that own the loop: they only say where steps end.

Batches whose gradients accumulate for one optimizer step are one step.

Trainer(..., callbacks=[stepscope.measure.callbacks.hugging_face("my-run")])
lightning.Trainer(..., callbacks=[stepscope.measure.callbacks.lightning("my-run")])
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from stepscope.measure.never_raise import never_raise
from stepscope.measure.watch import WatchedRun, watch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    # Begins when the run folder is known; what it returns is called when the run is captured.
    Beside = Callable[[Path], Callable[[], None]]


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
