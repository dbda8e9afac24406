"""A step that waits longer is slower, whatever the processor's clock and other programs do."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec.structs import replace
from test_against import BASE_MS, only_change, results, row, times
from test_against import invoke as invoke_fixture

from stepscope.bench.against import compare_results, slower_by, slower_with_machine
from stepscope.bench.results import BenchResults
from stepscope.bench.run_change import run_change, smallest_with_runs
from stepscope.errors import SlowerError
from stepscope.ui.bench.results import with_rerun
from stepscope.ui.bench.words import against_answer, against_notes, moved_words, parts_words

if TYPE_CHECKING:
    from stepscope.bench.results import WorkloadResult

invoke = invoke_fixture
QUIET = (0.0, 0.01, 0.0, 0.01, 0.0)
SLEEPS = (0.50, 0.51, 0.50, 0.51, 0.50)  # of a step that computes 10 ms
RESTLESS = (8.0, 12.5, 9.0, 13.0, 10.0)  # milliseconds, from start to start
# Half a percent for each of two sessions, and 2.2414: two comparisons of 95% together.
SESSIONS = 2.2414 * 0.005 * math.sqrt(2)


def taken_apart(
    computing: tuple[float, ...] = BASE_MS,
    waiting: tuple[float, ...] = QUIET,
    queue: float = 0.0,
    **fields: Any,
) -> WorkloadResult:
    runs = tuple(c + w + queue for c, w in zip(computing, waiting, strict=True))
    return row(
        runs, computing_ms=computing, waiting_ms=waiting, queue_ms=(queue,) * len(runs), **fields
    )


def alarms(base: WorkloadResult, now: WorkloadResult, share: float = 0.03) -> bool:
    comparison = compare_results(results(base), results(now), "base.json")
    return bool(slower_by(comparison, share))


def test_a_sleep_is_caught_where_computing_is_too_restless_to_see_it() -> None:
    change = only_change(taken_apart(RESTLESS), taken_apart(RESTLESS, SLEEPS))
    assert change.low is not None
    assert change.high is not None
    assert change.low < 0 < change.high  # the whole step alone says nothing
    assert change.verdict == "slower"
    assert change.decided_by == "waiting"
    assert change.waiting is not None
    # 0.5033 - 0.0033 ms, of 10.418 ms of computing (the geometric mean of the middle runs) + 0.0033
    computing_ms = (9.0 * 10.0 * 12.5) ** (1 / 3)
    assert change.waiting.change == pytest.approx(0.5 / (computing_ms + 0.01 / 3), rel=1e-6)
    assert change.counted_change == change.waiting.change
    assert SESSIONS < change.waiting.change - change.waiting.low < SESSIONS + 0.002
    assert alarms(taken_apart(RESTLESS), taken_apart(RESTLESS, SLEEPS))
    assert not alarms(taken_apart(RESTLESS), taken_apart(RESTLESS, SLEEPS), share=0.06)


def test_a_wait_that_is_gone_makes_the_step_faster() -> None:
    change = only_change(taken_apart(RESTLESS, SLEEPS), taken_apart(RESTLESS))
    assert change.verdict == "faster"
    assert change.decided_by == "waiting"
    assert "waits less, by" in parts_words(change)


def test_restless_computing_alone_is_no_alarm() -> None:
    slower = tuple(1.05 * ms for ms in reversed(RESTLESS))
    change = only_change(taken_apart(RESTLESS), taken_apart(slower))
    assert change.verdict == "no difference seen"
    assert change.waiting is not None
    assert change.waiting.change == 0


def test_other_programs_make_a_step_queue_which_is_no_wait() -> None:
    loaded = taken_apart(RESTLESS, QUIET, queue=0.5)
    change = only_change(taken_apart(RESTLESS), loaded)
    assert change.verdict == "no difference seen"
    assert change.waiting is not None
    assert change.waiting.change == 0


def test_a_wait_under_what_sessions_differ_by_is_not_claimed() -> None:
    assert 0.0158 < SESSIONS < 0.0159
    short = tuple(0.14 + ms for ms in QUIET)  # 1.4%
    assert only_change(taken_apart(), taken_apart(BASE_MS, short)).decided_by == "step"
    long = tuple(0.2 + ms for ms in QUIET)
    assert only_change(taken_apart(), taken_apart(BASE_MS, long)).decided_by == "waiting"


def test_a_longer_wait_for_which_the_step_computes_less_is_no_alarm() -> None:
    less = tuple(ms - 0.5 for ms in BASE_MS)  # another process does it
    change = only_change(taken_apart(), taken_apart(less, SLEEPS))
    assert change.waiting is not None
    assert change.computing is not None
    assert change.waiting.low > 0
    assert change.computing.high < 0
    assert change.decided_by == "step"
    assert change.verdict == "no difference seen"
    much_less = tuple(ms - 2.0 for ms in BASE_MS)
    assert only_change(taken_apart(), taken_apart(much_less, SLEEPS)).verdict == "faster"


def test_others_who_left_since_the_base_do_not_hide_a_wait() -> None:
    crowded = taken_apart(times(1.15), queue=20.0)
    now = taken_apart(BASE_MS, SLEEPS, queue=5.0)  # 13% less computing, 31% less of others
    change = only_change(crowded, now)
    assert change.decided_by == "waiting"
    assert change.verdict == "slower"
    same_crowd = taken_apart(BASE_MS, SLEEPS, queue=20.0)
    assert only_change(crowded, same_crowd).verdict == "faster"


def test_what_is_computed_less_counts_against_what_is_waited_longer() -> None:
    less = tuple(ms - 0.3 for ms in BASE_MS)
    waits = tuple(ms + 0.5 for ms in SLEEPS)  # 1.0 ms more
    change = only_change(taken_apart(), taken_apart(less, waits))
    assert change.decided_by == "waiting"
    assert change.verdict == "slower"
    assert change.counted_change == pytest.approx(0.07, abs=0.0005)  # (1.0 - 0.3) of 10 ms


def test_a_faster_clock_does_not_hide_a_wait() -> None:
    fast = tuple(ms / 1.9 for ms in BASE_MS)
    base = taken_apart(calibration_ms=(1.9,) * 5)
    now = taken_apart(fast, tuple(ms / 1.9 for ms in SLEEPS), calibration_ms=(1.0,) * 5)
    change = only_change(base, now)
    assert change.change is not None
    assert change.change < -0.4  # the whole step is much shorter
    assert change.verdict == "slower"
    assert change.counted_change == pytest.approx(0.05, abs=0.001)
    # And beside the yardstick, which says the same of computing.
    paced = {"paced": (2.0,) * 5, "paced_computing": (2.0,) * 5}
    change = only_change(replace(taken_apart(), **paced), replace(now, **paced))
    assert change.verdict == "slower"


def test_a_slower_clock_is_no_excuse_for_a_wait() -> None:
    slow = tuple(1.3 * ms for ms in BASE_MS)
    base = taken_apart(calibration_ms=(1.0, 1.01, 0.99, 1.0, 1.0))
    now = taken_apart(slow, tuple(0.3 + ms for ms in SLEEPS), calibration_ms=(1.4,) * 5)
    comparison = compare_results(results(base), results(now), "base.json")
    assert comparison.workloads[0].machine_changed
    assert slower_by(comparison, 0.03)
    assert not slower_with_machine(comparison, 0.03)
    assert against_answer(comparison).next.startswith("find what ncf waits for")


def test_the_time_that_others_had_the_cores_is_no_change() -> None:
    comparison = compare_results(results(taken_apart()), results(taken_apart(queue=20.0)), "b")
    change = comparison.workloads[0]
    assert change.verdict == "no difference seen"
    assert change.change == pytest.approx(0.0, abs=1e-9)
    (note,) = against_notes(comparison)
    assert (
        "other programs used the cores for 67% of the step. When the base was measured, it was 0%"
        in note
    )
    assert against_answer(comparison).next.startswith("nothing to do")


def test_others_who_slow_what_is_computed_raise_no_alarm_but_ask_for_a_new_base() -> None:
    now = taken_apart(times(1.25), queue=20.0)  # they use the caches too
    comparison = compare_results(results(taken_apart()), results(now), "base.json")
    assert comparison.workloads[0].verdict == "slower"
    assert not slower_by(comparison, 0.03)
    assert slower_with_machine(comparison, 0.03)
    alone = taken_apart(times(1.25), queue=0.5)
    comparison = compare_results(results(taken_apart()), results(alone), "base.json")
    assert slower_by(comparison, 0.03)


def test_beside_a_yardstick_a_change_must_show_by_the_clock_and_by_processor_time() -> None:
    steady = (2.0, 2.01, 1.99, 2.005, 1.995)
    slower = tuple(1.08 * ratio for ratio in steady)
    base = taken_apart(paced=steady, paced_computing=steady)
    shifted = taken_apart(paced=steady, paced_computing=slower)
    assert only_change(base, shifted).verdict == "no difference seen"
    both = taken_apart(times(0.8), paced=slower, paced_computing=slower)
    change = only_change(base, both)
    assert change.verdict == "slower"
    assert change.change == pytest.approx(0.08, abs=0.001)


def test_what_only_one_of_two_ways_shows_makes_the_smallest_change_larger() -> None:
    steady = (2.0, 2.01, 1.99, 2.005, 1.995)
    shorter = tuple(0.9 * ratio for ratio in steady)
    base = taken_apart(paced=steady, paced_computing=steady)
    agree = only_change(base, base).smallest_detectable
    differ = only_change(base, replace(base, paced=shorter)).smallest_detectable
    assert agree is not None
    assert differ is not None
    assert math.log1p(differ) == pytest.approx(math.log1p(agree) - math.log(0.9), rel=0.01)


@pytest.mark.parametrize("missing", ["base", "now"])
def test_old_files_without_the_parts_compare_as_before(missing: str) -> None:
    old, new = row(times(1.05)), taken_apart(times(1.05))
    plain = only_change(row(), old)
    sides = (row(), new) if missing == "base" else (taken_apart(waiting=(0.0,) * 5), old)
    change = only_change(*sides)
    assert change.waiting is None
    assert change.computing is None
    assert change.decided_by == "step"
    assert (change.change, change.low, change.high) == pytest.approx(
        (plain.change, plain.low, plain.high), rel=0.1
    )
    assert parts_words(change) == ""


def test_a_file_of_before_is_read() -> None:
    content = json.loads(msgspec.json.encode(results(taken_apart())))
    for name in ("computing_ms", "queue_ms", "waiting_ms", "paced_computing"):
        del content["workloads"][0][name]
    old = msgspec.convert(content, BenchResults)
    assert old.workloads[0].waiting_ms == ()


def test_one_disturbed_run_is_no_longer_wait() -> None:
    disturbed = (*QUIET[:-1], 3.0)
    assert only_change(taken_apart(RESTLESS), taken_apart(RESTLESS, disturbed)).verdict == (
        "no difference seen"
    )


def test_both_kinds_of_change_hold_together() -> None:
    alone = run_change(BASE_MS, BASE_MS, comparisons=2)
    change = only_change(taken_apart(waiting=(0.0,) * 5), taken_apart(waiting=(0.0,) * 5))
    assert alone is not None
    assert change.high == pytest.approx(math.expm1(alone.high))


def test_the_words_say_which_part_changed() -> None:
    change = only_change(taken_apart(), taken_apart(BASE_MS, SLEEPS))
    assert parts_words(change).startswith("waits longer, by 5.0% of the step (+3.4% to +6.6%); ")
    assert "computing: no difference seen (" in parts_words(change)
    assert moved_words(change) == "waiting +0.500 ms"
    comparison = compare_results(
        results(taken_apart(RESTLESS)), results(taken_apart(RESTLESS, SLEEPS)), "base.json"
    )
    answer = against_answer(comparison)
    assert answer.verdict == "slower: ncf +4.8%; 1 workload compared"
    assert answer.why.startswith("ncf waits longer, by 4.8% of the step (")
    same = compare_results(results(taken_apart()), results(taken_apart()), "base.json")
    assert against_answer(same).why.endswith(", and a wait of 2.2% of the step")


def test_a_wait_ends_the_bench_with_code_5(invoke: Any) -> None:
    done = invoke(
        results(taken_apart(RESTLESS, SLEEPS)),
        "--fail-on-slower",
        "3%",
        base=results(taken_apart(RESTLESS)),
    )
    assert isinstance(done.exception, SlowerError)
    assert "ncf +4.8% (waiting); --fail-on-slower allows 3%" in str(done.exception)
    assert "waiting +0.500 ms" in done.stdout


def test_a_rerun_that_waits_longer_does_not_agree() -> None:
    base = results(taken_apart(RESTLESS))
    rerun = with_rerun(base, results(taken_apart(RESTLESS, SLEEPS)), "base.json").reruns[-1]
    assert rerun.differs == ("ncf is 4.8% slower",)


def test_more_runs_see_less() -> None:
    seen = [
        smallest_with_runs(BASE_MS, BASE_MS, runs, comparisons=1, power=0.8)
        for runs in ((5, 5), (30, 30))
    ]
    now = run_change(BASE_MS, BASE_MS)
    assert now is not None
    assert seen[0] == pytest.approx(now.smallest)
    assert seen[1] < seen[0]
    assert smallest_with_runs([1.0], [1.0], (5, 5), comparisons=1, power=0.8) == math.inf
