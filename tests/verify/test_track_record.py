"""Promised against delivered."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from folders import noisy, write_run
from hypothesis import given
from hypothesis import strategies as st
from promises import kept, promise

from stepscope.errors import UsageError
from stepscope.records.comparison import Comparison
from stepscope.records.promise import Kept, Workload
from stepscope.verify.compare import compare, with_promise
from stepscope.verify.track_record import (
    adjust,
    deliver,
    history,
    matching_promises,
    open_promises,
    remember,
    summarise,
)
from stepscope.verify.workload import signature


@pytest.fixture
def tried(tmp_path: Path) -> Comparison:
    """20 ms before, 16.4 ms after."""
    a = write_run(tmp_path / "a", noisy(20, seed=1))
    b = write_run(tmp_path / "b", noisy(16.4, seed=2))
    return compare([str(a)], [str(b)])


def test_a_promise_is_open_until_a_comparison_has_it_as_its_baseline(tried: Comparison) -> None:
    assert open_promises() == ()
    remember(promise())
    assert [each.id for each in open_promises()] == ["id1.0"]
    answered = deliver(tried)
    assert answered is not None
    assert answered.delivered_ms == pytest.approx(20 * tried.b_ms / tried.a_ms)
    assert answered.error == pytest.approx(16.4 / 16 - 1, abs=0.01)
    assert answered.inside
    assert open_promises() == ()
    assert history() == (answered,)


def test_the_newest_matching_promise_is_answered(tried: Comparison) -> None:
    for when in (1.0, 3.0, 2.0):
        remember(promise(when_unix=when, path=f"run-{when}"))
    answered = deliver(tried)
    assert answered is not None
    assert answered.promise.id == "id3.0"
    assert [each.id for each in open_promises()] == ["id2.0", "id1.0"]


@pytest.mark.parametrize(
    "changes",
    [
        {"baseline_ms": 25.0},
        {"host": "elsewhere"},
        {"workload": Workload(script="other.py", world_size=1)},
        {"workload": Workload(script="train.py", world_size=8)},
        {"workload": Workload(device="NVIDIA H200")},  # nothing that says what was trained
    ],
)
def test_promises_about_something_else_stay_open(
    tried: Comparison, changes: dict[str, Any]
) -> None:
    remember(promise(**changes))
    assert matching_promises(tried) == ()
    assert deliver(tried) is None


def test_a_promise_is_answered_by_its_name_whatever_matches(tried: Comparison) -> None:
    remember(promise(id="abcd1234", baseline_ms=25.0, host="elsewhere"))
    answered = deliver(tried, "abcd")
    assert answered is not None
    assert answered.delivered_ms == pytest.approx(25 * tried.b_ms / tried.a_ms)
    assert answered.delivery is not None
    assert answered.delivery.named
    again = deliver(tried, "abcd1234")  # the newest delivery counts
    assert again is not None
    assert history(every_host=True)[0].delivery == again.delivery


def test_a_name_nobody_has_is_wrong_use(tried: Comparison) -> None:
    with pytest.raises(UsageError, match="no promise has that id"):
        deliver(tried, "zzz")
    remember(promise(id="abc1"))
    remember(promise(id="abc2", path="another run"))
    with pytest.raises(UsageError, match="more than one promise"):
        deliver(tried, "abc")


def test_which_of_several_what_ifs_was_tried_the_user_has_to_say(tried: Comparison) -> None:
    remember(promise("precision=bf16", id="one"))
    remember(promise("fused-optimizer", id="two"))
    found = with_promise(tried)
    assert found.promise is None
    assert any("--promise: " in note and "one (precision=bf16)" in note for note in found.notes)
    assert len(open_promises()) == 2
    answered = with_promise(tried, "two").promise
    assert answered is not None
    assert answered.promise.name == "fused-optimizer"
    only = with_promise(tried).promise
    assert only is not None
    assert only.promise.id == "one"


def test_a_run_that_is_a_again_answers_nothing(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", noisy(20, seed=1))
    b = write_run(tmp_path / "b", noisy(20, seed=2))
    remember(promise())
    found = with_promise(compare([str(a)], [str(b)]))
    assert found.promise is None
    assert any("B looks like A run again" in note for note in found.notes)
    other = write_run(tmp_path / "c", noisy(20, seed=2), command=("python", "train.py", "--bf16"))
    answered = with_promise(compare([str(a)], [str(other)])).promise
    assert answered is not None  # it was tried, and did nothing
    assert answered.inside is False


def test_profiled_steps_answer_no_promise(golden: Path) -> None:
    trace = str(golden / "h200-resnet18/rank-00000/trace.json.gz")
    found = compare([trace], [trace], cache=False)
    remember(promise())
    assert deliver(found) is None
    with pytest.raises(UsageError, match="without the profiler"):
        deliver(found, "id1.0")


def test_a_promise_without_numbers_is_refused() -> None:
    with pytest.raises(UsageError, match="a promise needs"):
        remember(promise(predicted_ms=0.0))


def test_names_of_what_ifs_do_not_depend_on_order_or_values() -> None:
    assert promise("b=1 a=2").name == promise("a=3 b").name == "a+b"
    assert promise("precision=bf16 batch").words == "precision=bf16 batch"


def test_summary_by_hand() -> None:
    rows = [
        kept(16.8, id="1"),  # +5%, inside
        kept(14.4, id="2"),  # -10%, outside
        kept(16.0, id="3"),  # 0
        Kept(promise=promise(id="4")),
        Kept(promise=promise("batch=16", id="5")),
    ]
    first, second = summarise(rows)
    assert (first.name, first.promised, first.delivered) == ("precision", 4, 3)
    assert first.median_error == pytest.approx(0.05)
    assert first.median_bias == pytest.approx(0.0)
    assert first.inside == pytest.approx(2 / 3)
    assert (second.name, second.delivered, second.median_error) == ("batch", 0, None)


# Adjusting predictions


def test_without_history_a_prediction_stays() -> None:
    assert adjust("precision", 10.0, 9.0, 11.0, ()) == (10.0, 9.0, 11.0)
    other = [kept(20.0, name="batch=16")]
    assert adjust("precision", 10.0, 9.0, 11.0, other) == (10.0, 9.0, 11.0)


def test_one_delivery_moves_a_fifth_of_the_way() -> None:
    # e = ln(17/16), shift = 1/5 e; the interval is not left, so it is not widened
    moved, low, high = adjust("precision", 10.0, 9.0, 11.0, [kept(17.0)])
    shift = math.log(17 / 16) / 5
    assert moved == pytest.approx(10 * math.exp(shift))
    stretch = math.sqrt((4 + (1.959964 * 4 / 5) ** 2) / 5)
    assert low == pytest.approx(moved * (9 / 10) ** max(1, stretch))
    assert high == pytest.approx(moved * (11 / 10) ** max(1, stretch))


def test_many_deliveries_move_it_nearly_all_the_way() -> None:
    moved, low, high = adjust("precision", 10.0, 9.0, 11.0, [kept(17.6)] * 96)
    assert moved == pytest.approx(10 * 1.1, rel=0.01)
    assert low < 11 < high


def test_misses_widen_the_interval_by_hand() -> None:
    # errors of +20% and -20% (as logarithms) with promised half-widths of ln(17/16), ln(16/15)
    away = math.exp(0.2)
    told = [kept(16 * away), kept(16 / away)]
    moved, _, high = adjust("precision", 10.0, 9.0, 11.0, told)
    z = [0.2 / math.log(17 / 16), 0.2 / math.log(16 / 15)]
    stretch = math.sqrt((4 + sum((1.959964 * each) ** 2 for each in z)) / 6)
    assert moved == pytest.approx(10)
    assert high == pytest.approx(10 * (11 / 10) ** stretch)


def test_good_promises_are_not_made_to_look_better_than_they_said() -> None:
    assert adjust("precision", 10.0, 9.0, 11.0, [kept(16.0)] * 50) == pytest.approx((10, 9, 11))


def test_an_interval_without_width_is_widened_too() -> None:
    moved, low, high = adjust("precision", 10.0, 10.0, 10.0, [kept(20.0)] * 4)
    assert low < moved < high


@given(
    st.lists(st.floats(1.0, 100.0), max_size=20),
    st.floats(0.1, 100.0),
    st.floats(0.5, 1.0),
    st.floats(1.0, 2.0),
)
def test_adjusted_intervals_hold_their_prediction_and_never_narrow(
    delivered: list[float], ms: float, low: float, high: float
) -> None:
    told = [kept(each) for each in delivered]
    moved, below, above = adjust("precision", ms, ms * low, ms * high, told)
    assert 0 < below <= moved <= above
    assert above / below >= high / low * (1 - 1e-9)


def test_signature_is_of_what_a_model_is_made_of() -> None:
    products = [("aten::mm", "[[8, 4], [4, 2]]"), ("aten::addmm", "[[2], [8, 4], [4, 2]]")]
    assert signature(products) == signature([*reversed(products), *products])
    assert signature([*products, ("aten::relu", "[[8]]")]) == signature(products)
    assert signature([("aten::mm", "[[16, 4], [4, 2]]")]) != signature(products[:1])
    assert signature([("aten::relu", "[[8]]")]) is None


def test_trace_and_explanation_give_the_same_workload(golden: Path) -> None:
    import stepscope
    from stepscope.verify.workload import workload_of, workload_of_trace

    path = golden / "h200-resnet18/rank-00000/trace.json.gz"
    explained = workload_of({}, stepscope.explain_job(path, cache=False))
    assert explained.signature is not None
    assert workload_of_trace(stepscope.read_trace(path)) == explained


def test_the_same_promise_is_made_once_until_it_is_answered(tried: Comparison) -> None:
    """Else one trial, compared twice, would count twice."""
    assert remember(promise(id="first")).id == "first"
    assert remember(promise(id="again", when_unix=5.0)).id == "first"
    assert [each.id for each in open_promises()] == ["first"]
    assert deliver(tried) is not None
    assert deliver(tried) is None
    assert remember(promise(id="once more")).id == "once more"
