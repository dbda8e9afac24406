"""Weights & Biases: into the run that is open in this process, else a new one.

A run of the user's own keeps its step numbers: our values join its next row. Charts have
`stepscope/step` as their axis.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.ui.loggers.run_log import PREFIX, MetricLog, MetricPoint, RunConclusion
from stepscope.ui.say import say

_DEFAULT_PROJECT = "stepscope"
_STEP = f"{PREFIX}/step"


class WandbLog(MetricLog):
    """Without an account on this machine, a new run is kept offline for `wandb sync`."""

    def __init__(self, target: str, run: Path, joined: Any = None) -> None:
        self._is_ours = joined is None
        self._run: Any = joined if joined is not None else _new_run(target, run)
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric(f"{PREFIX}/*", step_metric=_STEP)

    def points(self, points: Sequence[MetricPoint]) -> None:
        for point in points:
            self._run.log({_STEP: point.step, **point.values}, commit=self._is_ours)

    def conclude(self, conclusion: RunConclusion, step: int) -> None:
        del step  # the summary is the run's
        words = {f"{PREFIX}/verdict": conclusion.verdict, f"{PREFIX}/findings": conclusion.text}
        self._run.summary.update({**conclusion.values, **words})

    def close(self) -> None:
        if self._is_ours:
            self._run.finish()


def _new_run(target: str, run: Path) -> Any:
    import wandb

    mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_account(wandb) else "offline")
    opened = wandb.init(
        project=target or os.environ.get("WANDB_PROJECT") or _DEFAULT_PROJECT,
        name=run.name,
        dir=os.environ.get("WANDB_DIR") or str(run),
        mode=mode,
        config={f"{PREFIX}_folder": str(run.absolute())},
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )
    if mode == "offline":
        say(f"wandb is offline: `wandb sync {Path(opened.dir).parent}` uploads the run")
    return opened


def _has_account(wandb: Any) -> bool:
    """Whether `wandb login` was done here; without one, wandb would ask in the terminal."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # older versions always ask
        return bool(wandb.api.api_key)
