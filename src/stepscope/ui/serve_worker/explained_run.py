"""Answer what needs a run's traces: its verdict and MFU, and what changes would save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.explain.engines import open_engine
from stepscope.predict.engine import Bench
from stepscope.records.explanation import RankExplanation
from stepscope.records.prediction import Prediction
from stepscope.text.figures import interval, milliseconds, size
from stepscope.ui.cli.explain import explain_paths
from stepscope.ui.cli.whatif import parse_settings
from stepscope.ui.serve.listed_runs import RunSummary, device_words, short_text
from stepscope.ui.serve.metrics import least_mfu
from stepscope.ui.topics.whatif import (
    adjusted,
    gain_of,
    headline,
    judge,
    labels,
    predict_together,
    prediction_json,
    try_each,
    usual,
    verdict,
    why,
    with_offered,
)
from stepscope.verify.track_record import history


def explain_run(folder: Path) -> RunSummary:
    """Verdict, MFU and what else only the traces say; fields that stay None are not known."""
    with open_engine("pool", 1) as engine:  # a training may need the other cores
        explanation = explain_paths([folder], cache=True, html=None, quiet=True, engine=engine)
    slowest = max(explanation.ranks, key=lambda rank: rank.budget.step_ms, default=None)
    memory = slowest.memory if slowest else None
    return RunSummary(
        state="",
        verdict=short_text(explanation.verdict),
        mfu=least_mfu(explanation.ranks),
        step_ms=explanation.budget.step_ms or None,
        device=device_words(slowest.device) if slowest and slowest.device else None,
        peak_bytes=memory.peak_bytes if memory else None,
    )


# What-ifs for the page: changes made together, or the usual ones alone, in words and figures.


def predict_changes(
    bench: Bench, rank: RankExplanation, about: str, settings: Sequence[str]
) -> dict[str, Any]:
    """Without settings the usual changes and those that findings offer, one at a time."""
    wanted = parse_settings(settings)
    if not wanted:
        tried = try_each(bench, with_offered(usual(bench), rank.findings), history())
        before, predictions, refused = tried.before, tried.predictions, tried.refused
    else:
        before, after = bench.predict([]), adjusted(predict_together(bench, wanted), history())
        predictions, refused = (after,), after.refused
    on_host = bench.context.on_host
    return {
        "headline": headline(rank, before, about),
        "rows": [_row(one, before) for one in predictions],
        "why": why(before, predictions[0], on_host=on_host) if wanted else "",
        "assumptions": list(predictions[0].assumptions) if wanted else [],
        "refused": list(dict.fromkeys(refused)),
    }


def _row(prediction: Prediction, before: Prediction) -> dict[str, Any]:
    peak = prediction.peak_bytes
    return {
        "change": labels(prediction.settings),
        "settings": [str(setting) for setting in prediction.settings],
        "sentence": verdict(prediction),
        "judged": judge(prediction),
        "step": milliseconds(prediction.predicted_ms),
        "between": interval(prediction.low_ms, prediction.high_ms),
        "gain": " ".join(filter(None, gain_of(prediction).words())),
        "memory": "not known" if peak is None else size(peak),
        "json": prediction_json(prediction, before),
    }
