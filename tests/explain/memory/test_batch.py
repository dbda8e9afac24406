"""Memory against the batch: lines, their range, and what fits."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import NotCapturedError
from stepscope.explain.memory.captured import (
    CONTEXT_BYTES,
    LOW_SEGMENTS_SHARE,
    SEGMENTS_SHARE,
    batch_line,
    find_largest,
    peak_at,
    predict_peak,
)
from stepscope.records.memory import BatchLine, Memory
from stepscope.ui.topics.device_use import batch_words

HELD = {
    "parameters": 1000,
    "gradients": 0,
    "optimizer": 2000,
    "activations": 4000,
    "buffers": 10,
    "temporaries": 500,
    "other": 300,
}
SIZES = st.integers(0, 10**12)


def test_states_are_fixed_and_what_came_with_the_batch_grows():
    line = batch_line("peak", HELD, inputs_bytes=100, cast_bytes=400)
    assert line.fixed_bytes == 1000 + 2000 + 10 + 400 + 200
    assert line.scaling_bytes == 3600 + 500 + 100
    assert line.fixed_bytes + line.scaling_bytes == sum(HELD.values())
    assert line.maybe_fixed_bytes == 75 + 42  # of temporaries, and a hundredth of what scales
    assert line.maybe_scaling_bytes == 200 + 42


def test_prepared_batches_may_hold_the_same_samples_in_fewer_batches():
    """Then they do not grow, and the batch grows at their cost."""
    line = batch_line("peak", HELD, inputs_bytes=50, prepared_bytes=150)
    assert line.scaling_bytes == 4000 + 500 + 200
    assert line.maybe_fixed_bytes == 75 + 47 + 200


def test_temporaries_of_the_optimizer_do_not_grow():
    line = batch_line("peak", HELD, in_optimizer=True)
    assert line.scaling_bytes == 4000


def test_the_highest_line_is_the_peak():
    small = BatchLine(moment="optimizer", fixed_bytes=5000, scaling_bytes=0)
    large = BatchLine(moment="peak", fixed_bytes=1000, scaling_bytes=3000)
    assert peak_at((small, large), 1.0)[0] == 5000
    assert peak_at((small, large), 2.0)[0] == 7000


@given(fixed=SIZES, scaling=SIZES, factor=st.floats(0.01, 100), share=st.floats(0, 1))
def test_the_range_holds_the_prediction_and_closes_at_the_batch_now(fixed, scaling, factor, share):
    line = BatchLine(
        moment="peak",
        fixed_bytes=fixed,
        scaling_bytes=scaling,
        maybe_fixed_bytes=int(scaling * share),
        maybe_scaling_bytes=int(fixed * share),
    )
    middle, low, high = peak_at((line,), factor)
    assert low <= middle <= high
    assert peak_at((line,), 1.0) == (fixed + scaling,) * 3


def test_the_largest_batch_leaves_room_for_the_driver_and_for_rounding():
    line = BatchLine(moment="peak", fixed_bytes=2 * 10**9, scaling_bytes=8 * 10**9)
    fit = find_largest((line,), batch=8, batch_from="", limit_bytes=80 * 10**9, limit_from="device")
    room = (80 * 10**9 - CONTEXT_BYTES) * (1 - SEGMENTS_SHARE)
    assert fit.factor == pytest.approx((room - 2e9) / 8e9)
    assert fit.largest == int(8 * (room - 2e9) / 8e9)
    low = (80 * 10**9 - CONTEXT_BYTES) * (1 - LOW_SEGMENTS_SHARE)
    assert fit.low == int(8 * (low - 2e9) / 8e9)
    assert fit.high is not None
    assert fit.high >= fit.largest
    assert fit.per_sample_bytes == 10**9


def test_a_limit_that_was_given_is_all_ours():
    line = BatchLine(moment="peak", fixed_bytes=0, scaling_bytes=10**9)
    fit = find_largest((line,), batch=1, batch_from="", limit_bytes=10**10, limit_from="given")
    assert fit.reserve_bytes == 2 * 10**8
    assert fit.largest == 9


def test_nothing_fits_where_the_model_alone_does_not():
    line = BatchLine(moment="peak", fixed_bytes=100, scaling_bytes=10)
    fit = find_largest((line,), batch=4, batch_from="", limit_bytes=50, limit_from="given")
    assert (fit.largest, fit.low, fit.high) == (0, 0, 0)


def test_without_a_batch_the_answer_is_a_factor():
    line = BatchLine(moment="peak", fixed_bytes=0, scaling_bytes=10)
    fit = find_largest((line,), batch=None, batch_from=None, limit_bytes=100, limit_from="given")
    assert fit.factor == pytest.approx(9.8)
    assert fit.largest is None


def test_what_never_grows_always_fits():
    line = BatchLine(moment="peak", fixed_bytes=10, scaling_bytes=0)
    fit = find_largest((line,), batch=4, batch_from="", limit_bytes=100, limit_from="given")
    assert fit.factor is None
    assert fit.largest is None


@given(
    fixed=st.integers(0, 10**10),
    scaling=st.integers(1, 10**10),
    share=st.floats(0, 0.3),
    limit=st.integers(10**6, 10**11),
)
def test_low_is_never_above_high(fixed, scaling, share, limit):
    line = BatchLine(
        moment="peak",
        fixed_bytes=fixed,
        scaling_bytes=scaling,
        maybe_fixed_bytes=int(scaling * share),
        maybe_scaling_bytes=int(fixed * share),
    )
    fit = find_largest((line,), batch=64, batch_from="", limit_bytes=limit, limit_from="given")
    assert fit.factor is not None
    assert fit.factor_low <= fit.factor
    assert fit.factor_high is None or fit.factor_high >= fit.factor


def test_from_batch_4_on_an_h200_batches_2_8_and_16_are_predicted(shared):
    """GPT-2 small in fp32: peaks that torch itself counted, and what a hand knows of batch 4."""
    path = shared / "traces/h200/truth.json"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    truth = json.loads(path.read_text())
    parameters = 4 * truth["gpt2s_b4_fp32"]["params"]
    peak = truth["gpt2s_b4_fp32"]["peak_alloc"]
    activations = 4 * 816_906_240  # by formula, see test_theory
    held = dict(HELD, parameters=parameters, optimizer=2 * parameters, activations=activations)
    held |= {"buffers": 0, "other": 0, "temporaries": peak - 3 * parameters - activations}
    lines = (batch_line("peak", held),)
    assert peak_at(lines, 1)[0] == peak
    for batch, most in ((2, 0.01), (8, 0.01), (16, 0.012)):
        middle, low, high = peak_at(lines, batch / 4)
        real = truth[f"gpt2s_b{batch}_fp32"]["peak_alloc"]
        assert middle == pytest.approx(real, rel=most)
        assert low <= real <= high


def test_predicting_needs_bytes_by_category():
    memory = Memory(
        source="snapshot",
        device="cuda",
        peak_bytes=1,
        reserved_bytes=None,
        phase=None,
        measured="",
        categories={},
    )
    with pytest.raises(NotCapturedError, match="stepscope run"):
        predict_peak(memory, 2.0)


def test_a_range_without_a_high_end_says_at_least():
    """All that scales may be fixed: then nothing limits the batch from above."""
    line = BatchLine(moment="peak", fixed_bytes=10, scaling_bytes=10, maybe_fixed_bytes=10)
    for batch in (None, 4):
        fit = find_largest((line,), batch=batch, batch_from="", limit_bytes=100, limit_from="given")
        assert fit.factor_high is None
        assert "at least " in batch_words(fit)
        assert "None" not in batch_words(fit)
