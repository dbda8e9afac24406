"""Benches made from a trace and what else is known, without any file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.predict.engine import Bench
from stepscope.predict.whatifs import parse_setting
from stepscope.records.rank import RankInputs

if TYPE_CHECKING:
    from stepscope.records.job import Job
    from stepscope.records.memory import Memory
    from stepscope.records.prediction import Prediction
    from stepscope.records.run import RankRun
    from stepscope.records.trace import Trace


def analyse(trace: Trace, **inputs: Any) -> RankAnalysis:
    """`inputs` are other fields of RankInputs."""
    return RankAnalysis(RankInputs(trace=trace, **inputs))


def bench_for(
    trace: Trace,
    *,
    memory: Memory | None = None,
    job: Job | None = None,
    run: RankRun | None = None,
    **inputs: Any,
) -> Bench:
    """As `analyse`, with the rank's memory, its job and its run."""
    analysis = analyse(trace, **inputs)
    if run is not None:
        analysis.run = run
    return Bench(analysis, memory=memory, job=job)


def ask(bench: Bench, *settings: str) -> Prediction:
    """Predict changes as `whatif --set` spells them."""
    return bench.predict([parse_setting(setting) for setting in settings])
