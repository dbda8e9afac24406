"""Which remedies a tune tries together at once, from real traces."""

from __future__ import annotations

import pytest

from shared_traces import SHARED
from stepscope.fix.named_changes import choose
from stepscope.ui.tune.tuning import FAR_MORE, RemedyPredictions, predict_remedies

REMEDIES = ("tf32", "bf16", "fused-optimizer", "compile=default", "compile=reduce-overhead")


def predicted(trace: str, *remedies: str) -> RemedyPredictions:
    path = SHARED / "traces" / "h200" / f"{trace}.json.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return predict_remedies(path, [choose(name) for name in remedies])


def test_a_slow_precision_hides_a_slow_host_so_both_are_mended_at_once() -> None:
    found = predicted("vitb16_b64_fp32", *REMEDIES)
    together = found.together
    assert together is not None
    assert together.remedies[0] == "bf16"  # what gives most comes first
    assert "compile=reduce-overhead" in together.remedies
    assert "tf32" not in together.remedies  # one of a family
    alone = min(row.predicted_ms or 0.0 for row in found.by_remedy.values())
    assert together.predicted_ms < FAR_MORE * alone
    assert together.low_ms < together.predicted_ms < together.high_ms


def test_what_does_little_more_together_is_tried_alone() -> None:
    assert predicted("gpt2s_b8_bf16", "fused-optimizer", "compile=default").together is None


def test_one_remedy_is_no_combination() -> None:
    assert predicted("vitb16_b64_fp32", "bf16").together is None


def test_of_values_that_do_nearly_the_same_the_one_that_asks_less_is_tried() -> None:
    """fp16 needs a scaler of gradients."""
    found = predicted("vitb16_b64_fp32", "tf32", "bf16", "fp16", "compile=reduce-overhead")
    assert found.together is not None
    assert "bf16" in found.together.remedies
