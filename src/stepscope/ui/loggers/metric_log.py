"""Where metrics go. Everything here may fail: run_log.py catches it, and training goes on."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PREFIX = "stepscope"
# name on the command line -> its module, its class, and what `:...` after the name means
KINDS = {
    "tensorboard": ("tensorboard", "TensorBoardLog", "DIR"),
    "mlflow": ("mlflow", "MlflowLog", "EXPERIMENT"),
    "wandb": ("wandb", "WandbLog", "PROJECT"),
}


class MetricPoint(NamedTuple):
    """Values at one step of the training."""

    step: int
    unix_s: float
    values: Mapping[str, float]


class RunConclusion(NamedTuple):
    """What is known once the run is explained."""

    values: Mapping[str, float]
    verdict: str  # plain text, one line
    text: str  # verdict, next step and findings as Markdown


class MetricLog(ABC):
    """One place that metrics are logged to; used by one thread."""

    @abstractmethod
    def points(self, points: Sequence[MetricPoint]) -> None:
        """Log values by step; names begin with `stepscope/`."""

    @abstractmethod
    def conclude(self, conclusion: RunConclusion, step: int) -> None:
        """Log the run's final figures, the verdict and the findings; `step` is the last one."""

    @abstractmethod
    def close(self) -> None:
        """Write what is still to be written; a run that was open before stays open."""


class LogChoice(NamedTuple):
    """A logger as the user names it: `tensorboard:runs/mine`."""

    kind: str
    target: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.target}" if self.target else self.kind

    @classmethod
    def parse(cls, text: str) -> LogChoice:
        """UsageError for a logger that there is not."""
        kind, _, target = text.partition(":")
        if kind not in KINDS:
            known = ", ".join(f"{name}[:{word}]" for name, (_, _, word) in KINDS.items())
            raise UsageError(f"--log {text}: there is no logger {kind!r}; choose from {known}")
        return cls(kind, target)

    def find_open_run(self) -> Any:
        """The run of the user's own that is open in this thread, or None. Imports nothing."""
        if self.kind == "mlflow":
            active = getattr(sys.modules.get("mlflow"), "active_run", lambda: None)()
            return active.info.run_id if active is not None else None
        return getattr(sys.modules.get(self.kind), "run", None) if self.kind == "wandb" else None

    def connect(self, run: Path, joined: Any) -> MetricLog:
        """`joined` is the run of the user's own, if there is one. Imports the package: slow."""
        module, name, _ = KINDS[self.kind]
        kind = getattr(import_module(f"stepscope.ui.loggers.{module}"), name)
        log: MetricLog = kind(self.target, run, joined)
        return log
