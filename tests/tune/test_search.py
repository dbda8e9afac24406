"""What is tried, in which order, and what is kept, with made-up trials."""

from __future__ import annotations

import pytest
from simulated_runs import (
    TOOK_S,
    CrashesTogether,
    SimulatedCommand,
    contenders,
    made_up_fix,
    searched,
)

from stepscope.changes.change import Effect
from stepscope.errors import NotCapturedError
from stepscope.ui.tune.contenders import OUT_OF_TIME, TrialRules
from stepscope.verify.tuned_gain import FEWEST_PAIRS


def test_what_helps_is_kept_and_what_does_not_is_not() -> None:
    command = SimulatedCommand({"fast": 0.8, "same": 1.0, "slow": 1.3})
    search = searched(command, contenders(*map(made_up_fix, ("slow", "same", "fast"))))
    assert search.done
    assert search.kept == ("fast",)
    assert search.final is not None
    assert search.final.gain is not None
    assert search.final.gain.low < 0.2 < search.final.gain.high


def test_nothing_is_kept_where_nothing_helps() -> None:
    kept = [
        searched(SimulatedCommand({}, seed=seed), contenders(*map(made_up_fix, "abcdef"))).kept
        for seed in range(20)
    ]
    assert sum(map(bool, kept)) <= 2


def test_the_command_as_it_is_runs_twice_first_and_again_between_candidates() -> None:
    command = SimulatedCommand({})
    searched(command, contenders(*map(made_up_fix, "abcde")))
    assert command.asked[:9] == [
        (),
        (),
        ("a",),
        ("b",),
        ("c",),
        (),
        ("d",),
        ("e",),
        (),
    ]


def test_winners_are_combined_and_the_combination_is_confirmed() -> None:
    command = SimulatedCommand({"a": 0.8, "b": 0.85, "c": 1.0})
    search = searched(command, contenders(*map(made_up_fix, "abc")))
    assert search.kept == ("a", "b")
    assert search.final is not None
    assert search.final.base == ()
    assert search.final.challenger == ("a", "b")
    assert len(search.final.pairs) >= FEWEST_PAIRS
    assert search.final.gain is not None
    assert search.final.gain.value == pytest.approx(1 - 0.8 * 0.85, abs=0.02)


def test_a_combination_that_does_not_beat_its_parts_is_not_kept() -> None:
    """Both save the same time: together they save it once."""
    both = {frozenset("ab"): 1 / 0.8}
    command = SimulatedCommand({"a": 0.75, "b": 0.8}, together=both)
    search = searched(command, contenders(*map(made_up_fix, "ab")))
    assert search.kept == ("a",)
    assert [test.challenger for test in search.tests] == [("a",), ("a", "b")]


def test_pairs_change_their_order() -> None:
    command = SimulatedCommand({"a": 0.96}, starts=0.01)
    search = searched(command, contenders(made_up_fix("a")))
    numbers = [(base.number, challenger.number) for base, challenger in search.tests[0].pairs]
    assert len(numbers) >= 2
    assert numbers[0][0] < numbers[0][1]
    assert numbers[1][0] > numbers[1][1]


def test_of_a_family_the_best_is_kept() -> None:
    command = SimulatedCommand({"w=1": 0.9, "w=2": 0.7, "w=4": 0.8})
    family = [made_up_fix(f"w={value}", family="w") for value in (1, 2, 4)]
    search = searched(command, contenders(*family))
    assert search.kept == ("w=2",)
    assert all(len(configuration) <= 1 for configuration in command.asked)


def test_a_better_member_of_the_family_replaces_the_one_that_is_kept() -> None:
    """Alone x is a little better than y; on top of z it is y."""
    command = SimulatedCommand(
        {"x": 0.80, "y": 0.805, "z": 0.82},
        together={frozenset(("y", "z")): 0.8},
        starts=0.012,
    )
    fixes = [made_up_fix("x", family="f"), made_up_fix("y", family="f"), made_up_fix("z")]
    search = searched(command, contenders(*fixes))
    assert [test.challenger for test in search.tests if test.base == ("x", "z")] == [("y", "z")]
    assert search.kept == ("y", "z")


def test_what_does_not_help_alone_is_tried_again_on_top_of_what_is_kept() -> None:
    """b pays only once a is there, as static shapes do for graphs."""
    command = SimulatedCommand({"a": 0.8}, together={frozenset("ab"): 0.9})
    search = searched(command, contenders(*map(made_up_fix, "ab")))
    assert search.kept == ("a", "b")


def test_what_was_worse_alone_is_tried_again_once_the_step_is_another_one() -> None:
    """On a step of which most is gone, it saves what it could not save before."""
    both = {frozenset("ab"): 0.8 / 1.03}
    command = SimulatedCommand({"a": 0.3, "b": 1.03}, together=both)
    assert searched(command, contenders(*map(made_up_fix, "ab"))).kept == ("a", "b")
    command = SimulatedCommand({"a": 0.7, "b": 1.03}, together=both)
    search = searched(command, contenders(*map(made_up_fix, "ab")))
    assert search.kept == ("a",)
    assert ("a", "b") not in command.asked


def test_one_that_waits_for_a_family_is_tried_once_that_is_kept_even_if_it_was_worse() -> None:
    command = SimulatedCommand({"a": 0.8, "b": 1.2}, together={frozenset("ab"): 0.8 / 1.2})
    fixes = [made_up_fix("a", family="first"), made_up_fix("b", after=frozenset({"first"}))]
    search = searched(command, contenders(*fixes))
    assert search.kept == ("a", "b")


def test_a_rival_that_was_worse_alone_is_tried_again_beside_the_family_it_waits_for() -> None:
    """As bf16: slower in a step that the host paces, and the best of all once that is compiled."""
    command = SimulatedCommand(
        {"a": 0.6, "x": 0.9, "y": 1.1}, together={frozenset("ay"): 0.5, frozenset("ax"): 1.0}
    )
    waits = {"family": "precision", "after": frozenset({"first"})}
    fixes = [made_up_fix("a", family="first"), *(made_up_fix(name, **waits) for name in "xy")]
    search = searched(command, contenders(*fixes))
    assert search.kept == ("a", "y")


def test_one_that_waits_for_a_family_is_tried_beside_it_once() -> None:
    command = SimulatedCommand({"a": 0.6, "b": 0.7, "y": 1.3})
    waiting = made_up_fix("y", after=frozenset({"first"}))
    fixes = [made_up_fix("a", family="first"), made_up_fix("b"), waiting]
    searched(command, contenders(*fixes))
    assert sum({"a", "y"} <= set(remedies) for remedies in command.asked) == 1


def test_one_that_does_not_fit_at_first_joins_when_it_does() -> None:
    command = SimulatedCommand({"workers": 0.7, "prefetch": 0.9})
    late = made_up_fix("prefetch", after=frozenset({"loader"}))
    first = made_up_fix("workers", family="loader")
    assert searched(command, contenders(first), late=[late]).kept == ("prefetch", "workers")


def test_a_late_one_that_still_does_not_fit_is_left_alone() -> None:
    command = SimulatedCommand({"workers": 0.7, "prefetch": 0.9})
    late = made_up_fix("prefetch", after=frozenset({"loader"}), needs="no workers")
    first = made_up_fix("workers", family="loader")
    assert searched(command, contenders(first), late=[late]).kept == ("workers",)


def test_a_crash_costs_one_trial_and_says_why() -> None:
    command = SimulatedCommand({"a": 0.8, "bad": 0.5}, crashes=frozenset({"bad"}))
    search = searched(command, contenders(*map(made_up_fix, ("bad", "a"))))
    assert search.kept == ("a",)
    assert command.asked.count(("bad",)) == 1
    assert search.contenders[0].out == "failed: exit code 1 with bad"


def test_a_crash_of_a_combination_leaves_what_was_kept() -> None:
    command = CrashesTogether({"a": 0.8, "b": 0.85})
    search = searched(command, contenders(*map(made_up_fix, "ab")))
    assert search.kept == ("a",)
    assert "exit code 1" in search.tests[-1].why


def test_one_that_finds_nothing_to_change_is_out() -> None:
    command = SimulatedCommand({"a": 0.5}, idle=frozenset("a"))
    search = searched(command, contenders(made_up_fix("a")))
    assert search.kept == ()
    assert search.contenders[0].out == "it found nothing to change"


def test_more_memory_than_allowed_is_out() -> None:
    command = SimulatedCommand({"a": 0.5}, bytes={"a": 600})
    rules = TrialRules(memory_limit=1500)
    assert searched(command, contenders(made_up_fix("a")), rules=rules).kept == ()
    rules = TrialRules(memory_limit=1600)
    assert searched(command, contenders(made_up_fix("a")), rules=rules).kept == ("a",)


def test_a_command_that_fails_as_it_is_cannot_be_tuned() -> None:
    class Broken(SimulatedCommand):
        def run(self, number, remedies, **rest):  # type: ignore[no-untyped-def]
            trial = super().run(number, remedies, **rest)
            return type(trial)(
                number=number, remedies=(), folder="x", took_s=1.0, failed="exit code 1"
            )

    with pytest.raises(NotCapturedError, match="the unchanged command could not be measured"):
        searched(Broken({}), contenders(made_up_fix("a")))


def test_the_budget_ends_the_search_with_what_is_known() -> None:
    command = SimulatedCommand({"a": 0.8, "b": 0.8, "c": 0.8})
    search = searched(command, contenders(*map(made_up_fix, "abc")), budget_s=14 * TOOK_S)
    assert search.out_of_time or search.done
    assert len(command.asked) <= 14
    assert set(search.kept) <= set("abc")


def test_no_trial_is_started_that_would_not_end_in_time() -> None:
    command = SimulatedCommand({"a": 0.8})
    search = searched(command, contenders(*map(made_up_fix, "abcdefgh")), budget_s=8.5 * TOOK_S)
    assert len(command.asked) <= 8
    assert [name for name, _ in search.not_tried()]


def test_one_that_takes_long_to_start_does_not_use_up_the_time_of_the_others() -> None:
    command = SimulatedCommand({"a": 0.78, "b": 0.8}, slow={"a": 15 * TOOK_S})
    search = searched(command, contenders(*map(made_up_fix, "ab")), budget_s=30 * TOOK_S)
    assert search.kept == ("b",)
    assert search.out_of_time
    assert [test.why for test in search.tests if test.challenger == ("a",)] == [OUT_OF_TIME]


def test_what_is_predicted_not_to_help_is_skipped_where_time_is_short() -> None:
    command = SimulatedCommand({"a": 0.8})
    fixes = contenders(*map(made_up_fix, "abcdefgh"), hopeless="defgh")
    search = searched(command, fixes, budget_s=14 * TOOK_S)
    names = [name for name, _ in search.not_tried()]
    assert names
    assert set(names) <= set("defgh")
    plenty = searched(SimulatedCommand({"a": 0.8}), contenders(*map(made_up_fix, "abcd")))
    assert plenty.not_tried() == []


def test_one_that_claims_to_change_no_number_and_does_is_out() -> None:
    command = SimulatedCommand({"a": 0.5}, off={"a": 1e-6})
    search = searched(command, contenders(made_up_fix("a")))
    assert search.kept == ()
    assert search.contenders[0].checked is not None
    assert search.contenders[0].checked.parity == "failed"


def test_losses_that_look_wrong_are_compared_with_those_of_nudged_weights() -> None:
    rounds = made_up_fix("a", effect=Effect.ROUNDING)
    calm = SimulatedCommand({"a": 0.5}, off={"a": 0.02})
    refused = searched(calm, contenders(rounds))
    assert refused.kept == ()
    assert ("nudged-weights=fp32:2",) in calm.asked
    wild = SimulatedCommand({"a": 0.5}, off={"a": 0.02}, chaos=0.02)
    assert searched(wild, contenders(rounds)).kept == ("a",)
    assert wild.asked.count(("nudged-weights=fp32:1",)) == 1


def test_what_changes_no_number_gets_no_control() -> None:
    command = SimulatedCommand({"a": 0.5}, off={"a": 0.02})
    searched(command, contenders(made_up_fix("a")))
    assert not [names for names in command.asked if names and names[0].startswith("nudged")]


def test_rounding_is_kept_only_where_it_is_allowed() -> None:
    command = SimulatedCommand({"a": 0.5}, off={"a": 1e-7})
    fix = made_up_fix("a", effect=Effect.ROUNDING)
    assert searched(command, contenders(fix)).kept == ("a",)
    strict = TrialRules(allow=Effect.BIT_IDENTICAL)
    search = searched(command, contenders(fix), rules=strict)
    assert search.kept == ()
    assert search.contenders[0].out == "it rounds differently; --allow rounding keeps it"


def test_one_that_may_draw_other_random_numbers_is_kept_if_it_did_not() -> None:
    fix = made_up_fix("a", effect=Effect.RANDOM)
    assert searched(SimulatedCommand({"a": 0.5}), contenders(fix)).kept == ("a",)
    other = SimulatedCommand({"a": 0.5}, redrawn=frozenset("a"))
    search = searched(other, contenders(fix))
    assert search.kept == ()
    assert search.contenders[0].out == "it draws other random numbers; --allow random keeps it"
    allowed = TrialRules(allow=Effect.RANDOM)
    assert searched(other, contenders(fix), rules=allowed).kept == ("a",)


def test_a_script_without_a_seed_loses_nothing_by_other_random_numbers() -> None:
    command = SimulatedCommand({"a": 0.5}, redrawn=frozenset("a"), unseeded=True)
    search = searched(command, contenders(made_up_fix("a", effect=Effect.RANDOM)))
    assert search.kept == ("a",)


def test_time_that_is_left_after_confirming_goes_to_what_was_not_tried() -> None:
    """Half of the time is kept for confirming, which nothing here needs."""
    command = SimulatedCommand(dict.fromkeys("abcdefgh", 1.5))
    search = searched(command, contenders(*map(made_up_fix, "abcdefgh")), budget_s=16 * TOOK_S)
    assert search.not_tried() == []
    assert not search.out_of_time


def test_what_is_kept_is_confirmed_even_if_there_is_no_time_for_the_rest() -> None:
    command = SimulatedCommand({"a": 0.7, "b": 0.75} | dict.fromkeys("cdefgh", 0.9))
    fixes = contenders(*map(made_up_fix, "abcdefgh"))
    search = searched(command, fixes, budget_s=26 * TOOK_S)
    assert search.out_of_time
    assert {"a", "b"} <= set(search.kept)
    assert search.final is not None
    assert search.final.base == ()
    assert search.final.kept


def test_a_trial_that_takes_longer_than_the_budget_is_ended_and_blames_no_remedy() -> None:
    command = SimulatedCommand({"a": 0.5, "b": 0.8}, slow={"b": 50 * TOOK_S})
    search = searched(command, contenders(*map(made_up_fix, "ab")), budget_s=20 * TOOK_S)
    assert search.kept == ("a",)
    assert search.out_of_time
    assert ("b",) in command.asked
    assert [name for name, _ in search.not_tried()] == ["b"]


def test_a_trial_that_hangs_with_time_left_has_failed() -> None:
    command = SimulatedCommand({"a": 0.5, "b": 0.8}, slow={"b": 50 * TOOK_S})
    fixes = contenders(*map(made_up_fix, "ab"))
    search = searched(command, fixes, budget_s=90 * TOOK_S, limit_s=5 * TOOK_S)
    assert search.kept == ("a",)
    assert search.contenders[1].out == "failed: it was ended"


def test_what_ran_before_the_budget_ended_is_kept_if_it_settles_it() -> None:
    command = SimulatedCommand({"a": 0.95, "b": 0.2})
    search = searched(command, contenders(*map(made_up_fix, "abc")), budget_s=5.5 * TOOK_S)
    assert search.kept == ("b",)
    assert search.out_of_time


def test_what_did_best_is_told_where_the_budget_ends_before_it_is_sure() -> None:
    command = SimulatedCommand({"a": 0.95, "b": 0.85})
    search = searched(command, contenders(*map(made_up_fix, "abc")), budget_s=5.5 * TOOK_S)
    assert search.kept == ()
    leading = search.leading()
    assert leading is not None
    assert leading[0] == ("b",)
    assert leading[1].value == pytest.approx(0.15, abs=0.02)


def test_a_start_of_the_command_that_was_as_fast_speaks_against_a_gain() -> None:
    """Both runs of the command as it is were slow: the one that was captured was not."""
    command = SimulatedCommand({"a": 0.4})
    search = searched(
        command, contenders(made_up_fix("a")), captured_ms=45.0, budget_s=100 * TOOK_S
    )
    (test,) = search.tests
    assert test.kept
    assert len(test.pairs) >= 2
