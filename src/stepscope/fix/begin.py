"""Apply remedies to this process: the first thing that happens once torch is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from stepscope.changes import APPLIED
from stepscope.errors import RefusedError
from stepscope.fix.named_changes import CONTROLS, ChosenChange, choose_all
from stepscope.fix.training_process import TrainingProcess
from stepscope.fix.watch_script import ScriptWatch
from stepscope.records.script_facts import ScriptFacts


@dataclass(frozen=True, slots=True)
class ChangedTraining:
    """This process's training, with remedies applied."""

    training: TrainingProcess
    watch: ScriptWatch | None

    def content(self) -> list[dict[str, Any]]:
        """What became of each remedy, for rank.json."""
        return self.training.content()

    def files(self) -> dict[str, dict[str, Any]]:
        """What remedies leave in the rank's folder, by name."""
        return self.training.files()

    def script_facts(self) -> ScriptFacts | None:
        return self.watch.facts() if self.watch is not None else None


def begin(
    names: Iterable[str],
    when_imported: Callable[[str, Callable[[Any], None]], None],
    surrounds: Callable[[Any], Any],
    *,
    watch: bool,
) -> ChangedTraining:
    """`watch`: also note what the script is made of."""
    training = TrainingProcess(when_imported, surrounds)
    watching = ScriptWatch(training) if watch else None
    order = [*APPLIED, *CONTROLS]  # whatever order the user named them in
    for chosen in sorted(choose_all(names), key=lambda chosen: order.index(chosen.id)):
        _apply_one(training, chosen)
    return ChangedTraining(training, watching)


def apply(*names: str) -> list[dict[str, Any]]:
    """Apply changes in this script, before it builds its model, optimizer and data loaders.

    stepscope.fix.apply("fused-optimizer", "loader-workers=4")
    """
    import torch

    def when_imported(name: str, action: Callable[[Any], None]) -> None:
        action(import_module(name))

    def surrounds(function: Any) -> Any:
        return torch.compiler.disable(function, recursive=False)

    return begin(names, when_imported, surrounds, watch=False).content()


def _apply_one(training: TrainingProcess, chosen: ChosenChange) -> None:
    """One that cannot be applied is recorded, never raised."""
    with training.applying(str(chosen)) as applied:
        try:
            if chosen.application.patch_only:
                raise RefusedError(
                    "it is an edit of the script. `stepscope tune` proposes it as a patch"
                )
            if chosen.fix.environment is not None:
                _check_environment(training, chosen)
            if chosen.fix.apply is not None:
                chosen.fix.apply(training, chosen.value)
        except RefusedError as error:
            applied.refused = str(error)
        except Exception as error:
            applied.refused = f"a defect in stepscope: {type(error).__name__}: {error}"


def _check_environment(training: TrainingProcess, chosen: ChosenChange) -> None:
    """Tell what was set before this process started, and refuse if it is not there."""
    assert chosen.fix.environment is not None
    for name, value in chosen.fix.environment(chosen.value, os.environ).items():
        present = os.environ.get(name)
        if present == value:
            training.did(f"{name}={value}" if value is not None else f"{name} is not set")
            continue
        wanted = f"{name}={value}" if value is not None else f"{name} unset"
        if chosen.fix.apply is None:
            raise RefusedError(
                f"it needs {wanted} before Python starts, but here it is {present or 'unset'}"
            )
