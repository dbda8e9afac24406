"""Optuna's trials in arrays: the same best trial as one after the other; pruned ones make room."""

from __future__ import annotations

from typing import Any

import pytest
from test_sweep import STEPS, alone, build, means

from stepscope.fix.fuse.optuna_sweep import optimize

optuna = pytest.importorskip("optuna", reason="optuna is not installed")
EVERY, LIMIT = 4, 0.7336


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def suggest(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}


def serial_study(trials: int) -> Any:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    study.optimize(lambda trial: means(alone(suggest(trial)), EVERY)[-1], n_trials=trials)
    return study


def test_twelve_trials_end_with_the_best_of_serial_runs() -> None:
    plain = optuna.pruners.NopPruner()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1), pruner=plain)
    ended = optimize(study, build, suggest, trials=12, steps=STEPS, width=5, every=EVERY)
    serial = serial_study(12)
    assert len(ended) == 12
    assert study.best_trial.number == serial.best_trial.number
    assert study.best_value == pytest.approx(serial.best_value, rel=1e-4)
    assert [trial.params for trial in study.trials] == [trial.params for trial in serial.trials]


def test_a_pruned_trial_leaves_and_the_next_joins() -> None:
    pruner = optuna.pruners.ThresholdPruner(upper=LIMIT)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1), pruner=pruner)
    ended = optimize(study, build, suggest, trials=6, steps=STEPS, width=2, every=EVERY)
    states = {trial.number: trial.state.name for trial in study.trials}
    assert set(states.values()) == {"PRUNED", "COMPLETE"}
    for trial in ended:
        expected = means(alone(trial.config), EVERY)
        assert trial.losses == pytest.approx(expected[: len(trial.losses)], rel=1e-4)
        assert (states[trial.number] == "PRUNED") == (max(expected) > LIMIT)
