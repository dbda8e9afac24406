"""What is predicted for each remedy before it is tried; each prediction becomes a promise."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import StepscopeError, UsageError
from stepscope.predict.whatifs import WHATIFS, settings_for_remedy
from stepscope.records.prediction import Setting
from stepscope.trace.rank_facts import read_facts
from stepscope.ui.slowest_bench import open_slowest
from stepscope.ui.tried_remedies import applicable
from stepscope.ui.tune.contenders import FEWEST_TOGETHER
from stepscope.ui.tune.journal import PlannedCombination, PlannedRemedy
from stepscope.ui.whatif import adjusted, judge
from stepscope.verify.track_record import history, make_promise, remember
from stepscope.verify.tuned_gain import WORTH
from stepscope.verify.workload import describe_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepscope.fix.chosen import ChosenFix
    from stepscope.predict.whatif import Bench
    from stepscope.records.prediction import Prediction
    from stepscope.records.promise import TrackedPromise


FAR_MORE = 0.85  # of the step that the best alone is predicted to reach: worth trying at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyPredictions:
    """By remedy, as it is written. `note` says why nothing could be predicted."""

    baseline_ms: float | None = None
    by_remedy: dict[str, PlannedRemedy] = field(default_factory=dict)
    together: PlannedCombination | None = None
    leading: tuple[str, ...] = ()  # remedies of the finding that leads
    note: str = ""


def predict_remedies(run: Path, candidates: Sequence[ChosenFix]) -> RemedyPredictions:
    """Never raises: a remedy can be tried without a prediction."""
    try:
        bench, rank, _ = open_slowest(str(run), cache=False)
        before = bench.predict([])
        past = history()
        planned = [_predict(bench, chosen, past, run) for chosen in candidates]
        together = _fastest_together(bench, candidates, [row for row in planned if row])
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG") and not isinstance(error, StepscopeError):
            raise
        known = isinstance(error, StepscopeError)
        why = str(error) if known else f"a defect in stepscope: {type(error).__name__}: {error}"
        return RemedyPredictions(note=f"there is no prediction: {why}")
    return RemedyPredictions(
        baseline_ms=before.baseline_ms,
        by_remedy={row.remedy: row for row in planned if row is not None},
        together=together,
        leading=tuple(applicable(rank.findings[0])) if rank.findings else (),
    )


def _predictions(bench: Bench, chosen: ChosenFix) -> list[Prediction]:
    """Of the what-if that takes the remedy's value, or else of all that stand for the remedy."""
    name = chosen.remedy.id
    if chosen.value and name in WHATIFS and WHATIFS[name].takes_value:
        with contextlib.suppress(UsageError):  # it knows no such value
            return [bench.predict([Setting(name=name, value=chosen.value)])]
    return [bench.predict([setting]) for setting in settings_for_remedy(name)]


def _predict(
    bench: Bench, chosen: ChosenFix, past: Sequence[TrackedPromise], run: Path
) -> PlannedRemedy | None:
    """By the best of its what-ifs; None without any."""
    predictions = [
        (adjusted(raw, past), raw) for raw in _predictions(bench, chosen) if not raw.refused
    ]
    if not predictions:
        return None
    after, raw = max(predictions, key=lambda pair: pair[0].throughput_factor)
    return PlannedRemedy(
        remedy=str(chosen),
        setting=after.settings[0],
        predicted_ms=after.predicted_ms,
        low_ms=after.low_ms,
        high_ms=after.high_ms,
        promise=_promise(bench, raw, run),
        hopeless=judge(after) != "faster",
    )


def _promise(bench: Bench, raw: Prediction, run: Path) -> str | None:
    """The model's own number; None where the track record cannot be written."""
    trace = bench.context.trace
    workload = describe_trace(trace, read_facts(Path(trace.path).parent))
    with contextlib.suppress(StepscopeError):
        return remember(make_promise(raw, workload, str(run.absolute()))).id
    return None


class _CombinationSearch:
    """The fastest combination that the what-ifs know, one member of a family: add what gains most,
    exchange members for their rivals, until nothing is predicted to gain any more."""

    def __init__(
        self, bench: Bench, settings: dict[str, Setting], families: dict[str, str]
    ) -> None:
        self._bench, self._settings, self._families = bench, settings, families
        self._known: dict[frozenset[str], Prediction] = {}
        self.members: tuple[str, ...] = ()

    def grow(self) -> None:
        while (better := min(self._next(), key=self.step_ms, default=self.members)) != self.members:
            if self.step_ms(better) > (1 - WORTH) * self.step_ms(self.members):
                return
            self.members = better

    def predict(self, members: tuple[str, ...]) -> Prediction:
        key = frozenset(members)
        if key not in self._known:
            settings = dict.fromkeys(self._settings[name] for name in members)  # some share one
            self._known[key] = self._bench.predict(list(settings))
        return self._known[key]

    def step_ms(self, members: tuple[str, ...]) -> float:
        prediction = self.predict(members)
        return math.inf if prediction.refused else prediction.predicted_ms

    def _next(self) -> Iterator[tuple[str, ...]]:
        for name, family in self._families.items():
            if name not in self.members:
                rest = (one for one in self.members if self._families[one] != family)
                yield (*rest, name)


def _fastest_together(
    bench: Bench, candidates: Sequence[ChosenFix], planned: Sequence[PlannedRemedy]
) -> PlannedCombination | None:
    """None where the best alone is predicted to do nearly as much."""
    families = {str(chosen): chosen.family for chosen in candidates}
    settings = {row.remedy: row.setting for row in planned if row.setting is not None}
    search = _CombinationSearch(bench, settings, {name: families[name] for name in settings})
    search.grow()
    members = tuple(sorted(search.members, key=lambda name: search.step_ms((name,))))
    alone_ms = min((search.step_ms((name,)) for name in settings), default=math.inf)
    if len(members) < FEWEST_TOGETHER or search.step_ms(members) > FAR_MORE * alone_ms:
        return None
    after = search.predict(members)
    return PlannedCombination(
        remedies=members,
        predicted_ms=after.predicted_ms,
        low_ms=after.low_ms,
        high_ms=after.high_ms,
    )
