"""Parity on losses made by hand, and on small trainings whose losses were recorded."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stepscope.records.script_facts import ScriptFacts
from stepscope.verify.parity import Parity, Precision, check_parity, coarsest_precision
from stepscope.verify.trials import Loss

STEPS = 60


def run(values: object, passes: int = 1) -> dict[int, tuple[Loss, ...]]:
    """Rank 0's losses, so many in each step."""
    numbers = np.asarray(values, float).tolist()
    return {0: tuple(Loss(place // passes, value.hex()) for place, value in enumerate(numbers))}


def falling(seed: int = 0, noise: float = 0.05) -> np.ndarray:
    """A loss from 2.3 towards 1.5, with noise from batch to batch."""
    steps = np.arange(STEPS)
    return 1.5 + 0.8 * np.exp(-steps / 30) + noise * np.random.default_rng(seed).normal(size=STEPS)


def check(candidate: object, declared: str = "rounding", precision: Precision = "fp32") -> Parity:
    base = falling()
    return check_parity(
        [run(base), run(base)], [run(candidate)], declared=declared, precision=precision
    )


def test_equal_losses_are_bit_identical() -> None:
    found = check(falling(), "bit-identical")
    assert (found.parity, found.control, found.largest) == ("bit-identical", "bit-identical", 0.0)
    assert found.passed
    assert found.why == "all 60 losses are bit-identical"


def test_one_bit_is_not_bit_identical() -> None:
    losses = falling()
    losses[3:] = np.nextafter(losses[3:], 9.0)
    found = check(losses, "bit-identical")
    assert (found.parity, found.observed, found.first_difference) == ("failed", "rounding", 3)
    assert found.why.startswith("declared bit-identical, but it differs from step 3 on, by ")
    assert check(losses).parity == "rounding"


def test_zero_and_minus_zero_are_other_bits() -> None:
    zero = [run([0.0] * 20)] * 2
    assert (
        check_parity(zero, [run([-0.0] * 20)], declared="bit-identical").parity != "bit-identical"
    )


def test_rounding_that_grows_slowly_passes() -> None:
    grown = 1e-6 * np.sqrt(1 + np.arange(STEPS)) * np.random.default_rng(1).normal(size=STEPS)
    found = check(falling() * (1 + grown))
    assert (found.parity, found.control) == ("rounding", "bit-identical")
    assert found.largest == pytest.approx(np.abs(grown).max(), rel=0.3)


def test_rounding_that_training_made_large_passes_without_direction() -> None:
    """From 1e-7 on it doubles every two steps, up to a tenth of the noise between batches."""
    sign = np.random.default_rng(1).normal(size=STEPS)
    grown = np.minimum(1e-7 * 2 ** (np.arange(STEPS) / 2), 0.01) * sign
    assert check(falling() + grown).parity == "rounding"


def test_a_loss_of_another_scale_fails_in_every_precision() -> None:
    for precision in ("fp32", "tf32", "16 bits"):
        found = check(1.02 * falling(), precision=precision)
        assert found.parity == "failed"
        assert "the first loss is off by 2.0" in found.why


def test_a_step_that_is_too_short_is_seen_at_once_in_fp32() -> None:
    """The loss falls a tenth slower: 0.3% of the loss after one step."""
    steps = np.arange(STEPS)
    slower = falling() + 0.8 * (np.exp(-steps / 33) - np.exp(-steps / 30))
    found = check(slower)
    assert (found.parity, found.observed) == ("failed", "training")
    assert "the loss in step 1 is off by" in found.why


def test_a_step_that_is_too_short_is_seen_in_the_mean_in_16_bits() -> None:
    steps = np.arange(STEPS)
    gap = 0.8 * (np.exp(-steps / 36) - np.exp(-steps / 30))
    rounding = 1e-3 * np.random.default_rng(2).normal(size=STEPS)
    found = check(falling() + gap + rounding, precision="16 bits")
    assert found.parity == "failed"
    assert "% higher on average, rounding explains" in found.why
    assert check(falling() + rounding, precision="16 bits").parity == "rounding"


def test_other_random_numbers_are_no_rounding() -> None:
    found = check(falling(seed=7))
    assert (found.parity, found.observed) == ("failed", "random")
    assert check(falling(seed=7), declared="random").parity == "random"
    assert check(falling(seed=7) + 0.1, declared="random").parity == "failed"
    assert check(falling(seed=7) + 0.1, declared="training").parity == "training"


def test_what_nudged_weights_do_rounding_may_do() -> None:
    base, nudged = falling(), [run(falling() * factor) for factor in (1.02, 0.98)]
    both = [run(base), run(base)]
    off = check_parity(both, [run(base * 1.03)], declared="rounding")
    assert (off.parity, off.observed) == ("failed", "training")
    explained = check_parity(both, [run(base * 1.03)], declared="rounding", nudged=nudged)
    assert explained.parity == "rounding"
    beyond = check_parity(both, [run(base * 1.2)], declared="rounding", nudged=nudged)
    assert beyond.parity == "failed"


def test_what_other_draws_do_is_random_not_rounding() -> None:
    base, redrawn = falling(), [run(falling() * factor) for factor in (1.02, 0.98)]
    both = [run(base), run(base)]
    explained = check_parity(both, [run(base * 1.03)], declared="random", redrawn=redrawn)
    assert (explained.parity, explained.observed) == ("random", "random")
    declared_less = check_parity(both, [run(base * 1.03)], declared="rounding", redrawn=redrawn)
    assert declared_less.parity == "failed"


def test_a_control_that_was_cut_or_broke_says_nothing() -> None:
    base = falling()
    both, broken = [run(base), run(base)], np.where(np.arange(STEPS) == 9, math.nan, base * 1.2)
    short = base[:20] * 1.2
    controls = [run(broken), run(short)]
    off = check_parity(both, [run(base * 1.03)], declared="rounding", nudged=controls)
    assert off.parity == "failed"


def test_nan_fails_whatever_was_declared() -> None:
    losses = falling()
    losses[40] = math.nan
    found = check(losses, "training")
    assert found.parity == "failed"
    assert found.why == "the loss is NaN or infinite in step 40, but the baseline's is not"


def test_nan_in_both_is_left_out() -> None:
    losses = falling()
    losses[40] = math.nan
    other = losses * (1 + 1e-7)
    assert check_parity([run(losses)] * 2, [run(other)], declared="rounding").parity == "rounding"
    assert (
        check_parity([run(losses)] * 2, [run(losses)], declared="bit-identical").parity
        == "bit-identical"
    )
    never = [run([math.nan] * 30)] * 2
    assert check_parity(never, [run([1.0] * 30)], declared="rounding").parity == "not known"


def test_missing_losses_fail() -> None:
    assert check(falling()[:30]).why == "the losses end with step 29, the baseline's with step 59"
    base = [run(falling(), passes=2)] * 2
    fewer = check_parity(base, [run(falling()[:30])], declared="rounding")
    assert fewer.parity == "failed"
    assert fewer.why == "step 0 has 1 backward pass, but 2 in the baseline"
    none = check_parity([run(falling())] * 2, [{}], declared="rounding")
    assert none.parity == "failed"
    assert none.why == "no loss was captured, but the baseline has 60"


def test_a_last_step_may_be_cut_short() -> None:
    base = [run(falling(), passes=2)] * 2
    assert check_parity(base, [run(falling()[:-1], passes=2)], declared="rounding").passed


def test_without_losses_or_control_nothing_is_known() -> None:
    assert check_parity([{}, {}], [{}], declared="rounding").parity == "not known"
    once = check_parity([run(falling())], [run(falling())], declared="rounding")
    assert once.parity == "not known"
    assert not once.passed


def test_a_baseline_with_rounding_of_its_own_allows_as_much() -> None:
    """Atomic additions: no run equals another, though all are seeded."""
    rng = np.random.default_rng(3)
    noisy = [falling() * (1 + 1e-3 * rng.normal(size=STEPS)) for _ in range(4)]
    found = check_parity([run(one) for one in noisy[:3]], [run(noisy[3])], declared="bit-identical")
    assert (found.parity, found.control) == ("rounding", "rounding")
    off = check_parity([run(one) for one in noisy[:3]], [run(1.02 * noisy[3])], declared="rounding")
    assert off.parity == "failed"


def test_a_script_without_a_seed_is_compared_by_its_mean_only() -> None:
    base = [run(falling(seed)) for seed in range(4)]
    found = check_parity(base, [run(falling(9))], declared="bit-identical")
    assert (found.parity, found.control) == ("random", "random")
    assert "no fixed seed" in found.why
    off = check_parity(base, [run(falling(9) + 0.3)], declared="rounding")
    assert off.parity == "failed"


def test_the_worst_rank_decides() -> None:
    base = {rank: run(falling(rank))[0] for rank in range(3)}
    wrong = {**base, 1: run(1.1 * falling(1))[0]}
    found = check_parity([base, base], [wrong], declared="rounding")
    assert found.parity == "failed"
    assert found.why.startswith("rank 1: declared rounding")
    missing = {rank: losses for rank, losses in base.items() if rank != 2}
    assert check_parity([base, base], [missing], declared="rounding").why == (
        "rank 2: no loss was captured, but the baseline has 60"
    )


def test_a_loss_that_ends_near_zero_makes_nothing_large() -> None:
    base = 2.0 * np.exp(-np.arange(STEPS) / 3)
    found = check_parity([run(base)] * 2, [run(base + 1e-7)], declared="rounding")
    assert found.parity == "rounding"
    assert found.largest is not None
    assert found.largest < 1e-5


def test_the_coarsest_precision() -> None:
    plain = ScriptFacts()
    assert coarsest_precision(plain, ["fused-optimizer"]) == "fp32"
    assert coarsest_precision(plain, ["bf16", "fused-optimizer"]) == "16 bits"
    assert coarsest_precision(plain, ["tf32"]) == "tf32"
    assert coarsest_precision(ScriptFacts(autocast="bfloat16"), []) == "16 bits"
    assert coarsest_precision(ScriptFacts(dtypes=("bfloat16",)), []) == "16 bits"
    convolves = ScriptFacts(device="cuda", modules={"Conv2d": 3})
    assert coarsest_precision(convolves, ["channels-last"]) == "tf32"
    assert coarsest_precision(ScriptFacts(modules={"Conv2d": 3}), []) == "fp32"
