"""MLflow: into the run that is open in this process or named by MLFLOW_RUN_ID, else a new one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

from stepscope.ui.loggers.run_log import PREFIX, MetricLog, MetricPoint, RunConclusion

_DEFAULT_EXPERIMENT = "stepscope"
_MOST_AT_ONCE = 1000  # metrics that MLflow's log_batch takes
_LONGEST_TAG = 5000


class MlflowLog(MetricLog):
    """Metrics by step, the verdict as a tag, the findings as an artefact."""

    def __init__(self, target: str, run: Path, joined: str | None = None) -> None:
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()
        joined = joined or os.environ.get("MLFLOW_RUN_ID")
        self._is_ours = joined is None
        self._id = joined or self._create(target, run)

    def _create(self, target: str, run: Path) -> str:
        name = target or os.environ.get("MLFLOW_EXPERIMENT_NAME") or _DEFAULT_EXPERIMENT
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        created = self._client.create_run(experiment, run_name=run.name)
        self._client.set_tag(created.info.run_id, f"{PREFIX}.folder", str(run.absolute()))
        return str(created.info.run_id)

    def points(self, points: Sequence[MetricPoint]) -> None:
        self._log(
            (name, value, int(point.unix_s * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        )

    def conclude(self, conclusion: RunConclusion, step: int) -> None:
        now = int(time.time() * 1000)
        self._log((name, value, now, step) for name, value in conclusion.values.items())
        self._client.set_tag(self._id, f"{PREFIX}.verdict", conclusion.verdict[:_LONGEST_TAG])
        self._client.log_text(self._id, conclusion.text, f"{PREFIX}/findings.md")

    def _log(self, metrics: Iterable[tuple[str, float, int, int]]) -> None:
        from mlflow.entities import Metric

        batch = list(starmap(Metric, metrics))
        for first in range(0, len(batch), _MOST_AT_ONCE):
            self._client.log_batch(self._id, metrics=batch[first : first + _MOST_AT_ONCE])

    def close(self) -> None:
        if self._is_ours:
            self._client.set_terminated(self._id)
