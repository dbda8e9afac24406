"""An Optuna study whose trials train together: what is pruned leaves its array, the next one joins.

study = optuna.create_study(direction="minimize", pruner=optuna.pruners.MedianPruner())
optimize(study, build, lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)},
         trials=64, steps=500, width=16)

With `width` trials at a time the sampler knows the results of those that have ended, as with so
many workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stepscope.fix.fuse.sweep import Build, SweptTrial, sweep


def optimize(
    study: Any,
    build: Build,
    suggest: Callable[[Any], Mapping[str, Any]],
    *,
    trials: int,
    steps: int,
    width: int = 8,
    every: int = 50,
    seed: int = 0,
) -> list[SweptTrial]:
    """Tell the study the last reported loss of every trial; the trials, in the order they ended."""
    from optuna.trial import TrialState

    asked: list[Any] = []

    def configs() -> Iterator[Mapping[str, Any]]:
        for _ in range(trials):
            asked.append(study.ask())
            yield suggest(asked[-1])

    def is_hopeless(trial: SweptTrial) -> bool:
        asked[trial.number].report(trial.loss, trial.step)
        return not math.isfinite(trial.loss) or bool(asked[trial.number].should_prune())

    ended = []
    for trial in sweep(
        build, configs(), steps=steps, width=width, every=every, seed=seed, stop=is_hopeless
    ):
        own = asked[trial.number]
        if trial.state == "finished":
            study.tell(own, trial.loss)
        else:
            ending = TrialState.FAIL if trial.state == "failed" else TrialState.PRUNED
            study.tell(own, state=ending)
        ended.append(trial)
    return ended
