"""What-ifs for the page: changes made together, or the usual ones alone, in words and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from stepscope.errors import NotCapturedError
from stepscope.records.figures import interval, milliseconds, size
from stepscope.ui.cli.whatif import parse_settings
from stepscope.ui.whatif import (
    adjusted,
    gain_of,
    headline,
    judge,
    labels,
    prediction_json,
    try_each,
    usual,
    verdict,
    why,
    with_offered,
)
from stepscope.verify.track_record import history

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.predict.whatif import Bench
    from stepscope.records.explanation import RankExplanation
    from stepscope.records.prediction import Prediction


def predict_changes(
    bench: Bench, rank: RankExplanation, about: str, settings: Sequence[str]
) -> dict[str, Any]:
    """Without settings the usual changes and those that findings offer, one at a time."""
    wanted = parse_settings(settings)
    if not wanted:
        tried = try_each(bench, with_offered(usual(bench), rank.findings), history())
        before, predictions, refused = tried.before, tried.predictions, tried.refused
    else:
        before, raw = bench.predict([]), bench.predict(wanted)
        if not raw.applied:
            raise NotCapturedError("; ".join(dict.fromkeys(raw.refused)))
        after = adjusted(replace(raw, settings=raw.applied), history())
        predictions, refused = (after,), raw.refused
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
