"""Log a training to TensorBoard, MLflow or Weights & Biases from inside its own process.

with stepscope.loggers.watch("tensorboard:runs/mine", "mlflow") as run:
    for batch in loader:
        train(batch)
        run.step()

Trainer(..., callbacks=[stepscope.loggers.hugging_face("wandb")])
lightning.Trainer(..., callbacks=[stepscope.loggers.lightning("mlflow:my-experiment")])

Only rank 0 logs. From outside: `stepscope run --log tensorboard -- COMMAND`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.measure import watch as callbacks
from stepscope.measure.ranks import rank_and_world
from stepscope.measure.settings import VARIABLE
from stepscope.measure.watch import WatchedRun
from stepscope.measure.watch import watch as watch_steps
from stepscope.ui.jobs.environment import own_python
from stepscope.ui.loggers.run_log import LogChoice, begin_log
from stepscope.ui.say import say

__all__ = ["hugging_face", "lightning", "watch"]

_EXPLAIN_LIMIT_S = 300.0


@contextlib.contextmanager
def watch(*log: str, folder: str | Path | None = None, **options: Any) -> Iterator[WatchedRun]:
    """`stepscope.watch` with loggers: `tensorboard[:DIR]`, `mlflow[:EXPERIMENT]`,
    `wandb[:PROJECT]`. An MLflow or W&B run that is open is logged into."""
    begin = _begin_with(log)
    with contextlib.ExitStack() as afterwards, watch_steps(folder, **options) as run:
        afterwards.callback(begin(run.folder))
        yield run


def hugging_face(*log: str, folder: str | Path | None = None, **options: Any) -> Any:
    """A transformers.TrainerCallback that captures the training and logs it."""
    return callbacks.hugging_face(folder, beside=_begin_with(log), **options)


def lightning(*log: str, folder: str | Path | None = None, **options: Any) -> Any:
    """A lightning Callback that captures the training and logs it."""
    return callbacks.lightning(folder, beside=_begin_with(log), **options)


def _begin_with(log: Sequence[str]) -> Callable[[Path], Callable[[], None]]:
    """UsageError at once for a logger that there is not."""
    return partial(_begin, [LogChoice.parse(text) for text in log])


def _begin(choices: Sequence[LogChoice], folder: Path) -> Callable[[], None]:
    """Start to log a run folder; the result ends it, once the run is captured."""
    if rank_and_world()[0] != 0:
        return lambda: None
    log = begin_log(folder, choices)
    if log is None:
        return lambda: None
    return lambda: log.end(_explain(folder) if log.is_open else None)


def _explain(folder: Path) -> dict[str, Any] | None:
    """In a process of its own: the training's memory and threads stay as they are."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = own_python("stepscope", "explain", str(folder), "--json")
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_EXPLAIN_LIMIT_S,
        )
        if done.returncode == 0:
            explained: dict[str, Any] = json.loads(done.stdout)
            return explained
        why = done.stderr.decode(errors="replace").strip().split("\n")[-1]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        why = f"{type(error).__name__}: {error}"
    say(f"the run is logged without a verdict: {why}")
    return None
