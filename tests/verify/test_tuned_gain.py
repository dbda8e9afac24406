"""What a tune keeps: numbers by hand, and machines made of chance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stepscope.verify.spread import student_quantile
from stepscope.verify.tuned_gain import (
    FALSE_KEEPS,
    MOST_PAIRS,
    SURELY,
    WORTH,
    GainVerdict,
    TimedTrial,
    judge,
    level_of_next_test,
    screen,
    settle,
    start_noise,
)

BASE, CANDIDATE = (), ("bf16",)


def trial(remedies: tuple[str, ...], number: int, ms: float) -> TimedTrial:
    return TimedTrial(remedies=remedies, number=number, steps_ms=(ms,) * 20)


def pairs_of(base: list[float], candidate: list[float]) -> list[tuple[TimedTrial, TimedTrial]]:
    return [
        (trial(BASE, 2 * place, a), trial(CANDIDATE, 2 * place + 1, b))
        for place, (a, b) in enumerate(zip(base, candidate, strict=True))
    ]


def runs(pairs: list[tuple[TimedTrial, TimedTrial]]) -> list[TimedTrial]:
    return [one for pair in pairs for one in pair]


def test_the_levels_of_a_tune_by_hand() -> None:
    """A tenth of 5% is what single runs may settle. Of the rest, half is for the four expected
    tests: 0.5625% each. Then 1/2, 1/6, 1/12 of the other half."""
    assert level_of_next_test([], 4) == pytest.approx(0.005625)
    assert level_of_next_test([False] * 3, 4) == pytest.approx(0.005625)
    assert level_of_next_test([False] * 4, 4) == pytest.approx(0.01125)
    assert level_of_next_test([False] * 5, 4) == pytest.approx(0.0225 / 6)


def test_levels_of_failed_tests_never_add_up_to_more_than_is_allowed() -> None:
    for expected in (1, 3, 25):
        spent = sum(level_of_next_test([False] * count, expected) for count in range(2000))
        assert 0.89 * FALSE_KEEPS < spent < 0.9 * FALSE_KEEPS


def test_what_a_kept_candidate_had_passes_on() -> None:
    assert level_of_next_test([True, True], 4) == pytest.approx(3 * 0.005625)
    assert level_of_next_test([True, False, True], 4) == pytest.approx(2 * 0.005625)
    assert level_of_next_test([True, True, False], 4) == pytest.approx(0.005625)


def test_a_gain_and_its_interval_by_hand() -> None:
    """Savings of 0.10 and 0.12; starts of the base differ by 0.04, of the candidate by 0.02."""
    pairs = pairs_of([math.exp(0.10), math.exp(0.14)], [1.0, math.exp(0.02)])
    deviation = math.sqrt(
        (0.04**2 / 2 + 0.02**2 / 2) / 2
    )  # of one start, with two degrees of freedom
    gain = judge(pairs, runs(pairs), FALSE_KEEPS).gain
    assert gain is not None
    reach = student_quantile(2.0, 0.975) * math.sqrt(2) * deviation / math.sqrt(2)
    assert gain.value == pytest.approx(1 - math.exp(-0.11))
    assert gain.low == pytest.approx(1 - math.exp(-0.11 + reach))
    assert gain.high == pytest.approx(1 - math.exp(-0.11 - reach))


def test_a_third_is_sure_after_two_pairs() -> None:
    pairs = pairs_of([10.0, 10.1], [7.0, 7.05])
    others = [trial(BASE, number, ms) for number, ms in ((20, 10.05), (21, 9.95))]
    verdict = judge(pairs, [*runs(pairs), *others], level=0.001)
    assert verdict.decision == "kept"
    assert verdict.gain is not None
    assert verdict.gain.value == pytest.approx(0.3, abs=0.01)
    assert verdict.why == "saves 30% of the step"


def test_one_pair_is_never_enough() -> None:
    pairs = pairs_of([10.0], [5.0])
    others = [trial(BASE, number, 10.0) for number in range(10, 40)]
    verdict = judge(pairs, [*runs(pairs), *others], level=0.05)
    assert (verdict.decision, verdict.more) == ("more runs", 1)


def test_before_the_first_pair_two_are_asked_for() -> None:
    verdict = judge([], [], level=0.05)
    assert (verdict.decision, verdict.more, verdict.gain) == ("more runs", 2, None)


def test_a_gain_under_the_threshold_is_not_kept_however_sure() -> None:
    quiet = [trial(BASE, number, 10.0) for number in range(20, 60)]
    pairs = pairs_of([10.0] * MOST_PAIRS, [10.0 * (1 - WORTH + 0.004)] * MOST_PAIRS)
    verdicts = [
        judge(pairs[:count], [*runs(pairs[:count]), *quiet], level=0.05)
        for count in range(1, MOST_PAIRS + 1)
    ]
    assert "kept" not in [verdict.decision for verdict in verdicts]
    assert verdicts[-1].decision == "not kept"
    assert verdicts[-1].why == "gains less than 2.0%"


def test_more_than_half_the_threshold_must_be_sure() -> None:
    """Two pairs with starts that differ by 1.5% leave a gain of 4% open."""
    noisy = [
        trial(BASE, n, 10.0 * math.exp(0.015 * (-1) ** n / math.sqrt(2))) for n in range(20, 60)
    ]
    pairs = pairs_of([10.0] * 2, [9.6] * 2)
    verdict = judge(pairs, [*runs(pairs), *noisy], level=0.005)
    assert verdict.decision == "more runs"
    assert SURELY == 0.01
    many = pairs_of([10.0] * MOST_PAIRS, [9.6] * MOST_PAIRS)
    assert judge(many, [*runs(many), *noisy], level=0.05).decision == "kept"


def test_a_slower_candidate_ends_after_one_pair() -> None:
    quiet = [trial(BASE, number, 10.0) for number in range(20, 30)]
    pairs = pairs_of([10.0], [11.0])
    verdict = judge(pairs, [*runs(pairs), *quiet], level=0.05)
    assert verdict.decision == "not kept"
    assert verdict.why == "10% slower"


def test_a_machine_too_noisy_to_tell_is_named() -> None:
    rng = np.random.default_rng(4)
    noisy = [trial(BASE, n, 10.0 * math.exp(rng.normal(0, 0.08))) for n in range(20, 60)]
    pairs = pairs_of([10.0] * 3, [9.5] * 3)
    verdict = judge(pairs, [*runs(pairs), *noisy], level=0.001)
    assert verdict.decision == "not kept"
    assert verdict.why.startswith("not certain: starts of the same command differ by ")


def test_pairs_that_disagree_count_even_if_others_are_quiet() -> None:
    quiet = [trial(BASE, number, 10.0) for number in range(20, 60)]
    pairs = pairs_of([10.0, 10.0, 10.0], [9.0, 10.2, 8.0])
    assert judge(pairs, [*runs(pairs), *quiet], level=0.01).decision != "kept"


def test_a_loop_that_runs_pairs_while_asked_ends() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        pairs: list[tuple[TimedTrial, TimedTrial]] = []
        while judge(pairs, runs(pairs), level=0.01).decision == "more runs":
            place = 2 * len(pairs)
            base, other = (10 * math.exp(rng.normal(0, 0.03)) for _ in range(2))
            pairs.append((trial(BASE, place, base), trial(CANDIDATE, place + 1, 0.95 * other)))
        assert len(pairs) <= MOST_PAIRS


def test_too_few_steps_are_not_judged() -> None:
    short = TimedTrial(remedies=CANDIDATE, number=1, steps_ms=(5.0,) * 9)
    verdict = judge([(trial(BASE, 0, 10.0), short)], [], level=0.05)
    assert verdict.decision == "not kept"
    assert verdict.why == "a trial has 9 steady steps, but 10 are needed"


def test_screening_compares_with_the_runs_of_the_base_around_it() -> None:
    base = [trial(BASE, number, ms) for number, ms in ((0, 30.0), (4, 10.0), (8, 10.0), (12, 90.0))]
    candidate = trial(CANDIDATE, 6, 9.0)
    found = screen(candidate, base, [])
    assert found.gain.value == pytest.approx(0.1)
    assert found.gain.low < 0.1 < found.gain.high
    assert found.promising


def test_only_what_is_clearly_no_gain_is_not_promising() -> None:
    base = [trial(BASE, number, 10.0) for number in (0, 2, 4)]
    assert not screen(trial(CANDIDATE, 3, 10.0), base, base).promising
    assert screen(trial(CANDIDATE, 3, 9.82), base, base).promising
    restless = [trial(BASE, number, ms) for number, ms in ((0, 10.0), (2, 10.4), (4, 10.0))]
    assert screen(trial(CANDIDATE, 3, 10.1), restless, restless).promising


# How much two starts of one command differ: each configuration by itself, and by its likes.

A, B, C, D = ("a",), ("b",), ("c",), ("d",)


def test_all_configurations_are_pooled_by_hand() -> None:
    """Squares of successive differences, halved; 3 runs have 1.6 degrees of freedom, 2 have 1."""
    noise = start_noise({A: [0.0, 0.02, 0.0], B: [0.5, 0.54]})
    assert noise.freedom == pytest.approx(2.6)
    assert noise.deviation == pytest.approx(math.sqrt((1.6 * 0.0002 + 0.0008) / 2.6))


def test_it_has_a_floor_and_a_first_guess() -> None:
    assert start_noise({A: [1.0] * 4}).deviation == pytest.approx(0.003)
    assert start_noise({}).freedom == 0
    assert start_noise({}).deviation == 0.03


def test_a_steady_drift_is_no_noise() -> None:
    """Ten starts, each 1% slower: the standard deviation is 3%, the noise 0.7%."""
    noise = start_noise({A: [0.01 * number for number in range(10)]})
    assert noise.deviation == pytest.approx(0.01 / math.sqrt(2))


def test_likes_are_pooled_whoever_asks() -> None:
    logs = {A: [0.0, 0.02, 0.0, 0.02], B: [0.5, 0.52, 0.5], C: [0.3, 0.28, 0.3]}
    assert start_noise(logs, {A}) == start_noise(logs)


def made_up(deviations: dict[tuple[str, ...], float], runs: int, seed: int = 1) -> dict:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(0, each, runs).tolist() for name, each in deviations.items()}


def test_a_quiet_configuration_is_not_judged_by_restless_ones() -> None:
    logs = made_up({A: 0.2, B: 0.15, C: 0.005, D: 0.004}, runs=8)
    quiet, restless = start_noise(logs, {C, D}), start_noise(logs, {A, B})
    assert quiet.deviation < 0.03
    assert 0.08 < restless.deviation < 0.3
    assert quiet.freedom < start_noise(logs).freedom


def test_two_configurations_cannot_show_how_unlike_they_are() -> None:
    logs = made_up({A: 0.2, C: 0.005}, runs=8)
    assert start_noise(logs, {C}) == start_noise(logs)


def test_one_that_never_ran_twice_is_taken_for_a_usual_one() -> None:
    logs = made_up({A: 0.2, B: 0.05, C: 0.005}, runs=8)
    unknown = start_noise(logs, {D})
    assert start_noise(logs, {C}).deviation < unknown.deviation < start_noise(logs, {A}).deviation


@pytest.mark.parametrize("seed", range(5))
def test_students_interval_holds_where_configurations_differ(seed: int) -> None:
    """The quiet one's deviation is right on average, whatever the others do."""
    logs = made_up({A: 0.1, B: 0.03, C: 0.01, D: 0.01}, runs=40, seed=seed)
    assert start_noise(logs, {C, D}).deviation == pytest.approx(0.01, rel=0.35)


# What single runs settle.


def settled(
    base: list[float], candidate: float, *, number: int = 0, expected: int = 5
) -> GainVerdict | None:
    before = [trial(BASE, place, ms) for place, ms in enumerate(base)]
    after = [trial(CANDIDATE, len(base), candidate)]
    return settle(after, before, [*before, *after], number=number, expected=expected)


def test_a_gain_of_many_times_what_starts_differ_by_is_settled_by_one_run() -> None:
    """By hand: variance (1 * 0.0071^2 + 3 * 0.05^2) / 4, over one run and two: a deviation of
    0.0532; of 0.05% for the first of five expected, Student's t with four degrees of freedom is
    8.61 at 0.05%: log 1.58 would do."""
    verdict = settled([90.8, 91.7], 12.3)
    assert verdict is not None
    assert verdict.decision == "kept"
    assert verdict.gain is not None
    assert verdict.gain.value == pytest.approx(1 - 12.3 / math.sqrt(90.8 * 91.7), abs=1e-3)
    assert verdict.gain.low < 0.9 < 0.95 > verdict.gain.value
    assert settled([90.8, 91.7], 91.2 / 1.56) is None
    assert settled([90.8, 91.7], 91.2 / 1.75) is not None


def test_later_configurations_need_more() -> None:
    assert settled([90.8, 91.7], 91.2 / 1.8, number=40) is None


def test_nothing_is_settled_by_one_run_of_the_base_or_starts_that_differ() -> None:
    assert settled([91.0], 12.3) is None
    assert settled([91.0, 40.0], 20.0) is None
