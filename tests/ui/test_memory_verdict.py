"""A what-if that frees memory says so, whatever it does to the time."""

from __future__ import annotations

import pytest

from stepscope.records.prediction import Prediction, Setting
from stepscope.ui.topics.whatif import frees_memory, verdict


def prediction(predicted_ms: float, peak_bytes: int | None, high_bytes: int | None) -> Prediction:
    return Prediction(
        settings=(Setting(name="save-memory", value="5%"),),
        baseline_ms=100.0,
        baseline_low_ms=99.0,
        baseline_high_ms=101.0,
        baseline_from="truth",
        profiled_ms=100.0,
        predicted_ms=predicted_ms,
        low_ms=predicted_ms - 1,
        high_ms=predicted_ms + 1,
        host_ms=100.0,
        device_ms=50.0,
        peak_bytes=peak_bytes,
        peak_high_bytes=high_bytes,
        baseline_peak_bytes=4_000_000,
        throughput_factor=100.0 / predicted_ms,
    )


@pytest.mark.parametrize(
    ("predicted_ms", "words"),
    [(101.0, "change the step by little"), (110.0, "make the step 10% longer")],
)
def test_less_memory_is_the_verdict(predicted_ms: float, words: str) -> None:
    said = verdict(prediction(predicted_ms, 2_000_000, 2_500_000))
    assert "would cut peak memory by 50% (4.00 MB -> 2.00 MB)" in said
    assert words in said


@pytest.mark.parametrize(
    ("peak_bytes", "high_bytes"), [(None, None), (3_900_000, 3_950_000), (3_000_000, 4_100_000)]
)
def test_too_little_or_unsure_is_not(peak_bytes: int | None, high_bytes: int | None) -> None:
    unsure = prediction(101.0, peak_bytes, high_bytes)
    assert not frees_memory(unsure)
    assert "would change the step by less than 2%" in verdict(unsure)
