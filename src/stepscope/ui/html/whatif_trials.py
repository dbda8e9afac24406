"""Changes made to a step one after the other, as `whatif` makes them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from stepscope.predict.whatifs import in_order

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.predict.whatif import Bench, Trial
    from stepscope.records.prediction import Setting

_KEPT = 64  # trials, each with its own graph


class Trials:
    """The trial of every combination; what combinations share is predicted once."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._trial = lru_cache(maxsize=_KEPT)(self._change)

    def make(self, settings: Iterable[Setting]) -> Trial:
        """One that refuses a change is left as it was before it."""
        return self._trial(tuple(in_order(settings)))

    def _change(self, ordered: tuple[Setting, ...]) -> Trial:
        if not ordered:
            return self.bench.begin()
        trial = self._trial(ordered[:-1])
        return trial if trial.refused else self.bench.change(trial, ordered[-1])
