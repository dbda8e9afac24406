"""Promised against delivered."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promises import delivery, kept, promise

from stepscope.errors import UsageError
from stepscope.records.prediction import Promise, TrackedPromise
from stepscope.verify.track_record import (
    Line,
    adjust,
    append,
    count_unread,
    find_promise,
    forget,
    forget_all_of,
    history,
    ignored_deliveries,
    node_name,
    open_promises,
    read_lines,
    record_folder,
    remember,
    summarise,
)
from stepscope.verify.traits import signature


def test_a_promise_is_open_until_something_is_delivered() -> None:
    assert open_promises() == ()
    remember(promise())
    assert [each.id for each in open_promises()] == ["id1.0"]
    append(delivery())
    assert open_promises() == ()
    assert history()[0].delivered_ms == pytest.approx(16)


def test_a_name_nobody_has_is_wrong_use() -> None:
    with pytest.raises(UsageError, match="no prediction has that id"):
        find_promise("zzz")
    remember(promise(id="abc1"))
    remember(promise(id="abc2", path="another run"))
    with pytest.raises(UsageError, match="more than one prediction"):
        find_promise("abc")
    assert find_promise("abc2").id == "abc2"


def test_an_id_that_another_one_begins_with_is_found() -> None:
    remember(promise(id="abc"))
    remember(promise(id="abcd", path="another run"))
    assert find_promise("abc").id == "abc"


# What no longer counts


def test_a_forgotten_promise_is_gone_and_the_file_only_grows() -> None:
    remember(promise(id="aa"))
    append(delivery(promise="aa", when_unix=2.0))
    (file,) = record_folder().glob("*.jsonl")
    before = file.read_bytes()
    assert forget("a").id == "aa"
    assert history() == ()
    assert open_promises() == ()
    assert file.read_bytes().startswith(before)
    assert len(file.read_bytes()) > len(before)
    with pytest.raises(UsageError, match="no prediction has that id"):
        forget("aa")
    assert remember(promise(id="bb")).id == "bb"  # it can be promised again


def test_a_promise_whose_delivery_is_forgotten_is_open_again() -> None:
    remember(promise(id="aa"))
    append(delivery(promise="aa", when_unix=2.0))
    forget("aa", delivery_only=True)
    assert [each.id for each in open_promises()] == ["aa"]
    append(delivery(promise="aa", when_unix=time.time() + 60, b_ms=15.0))
    assert history()[0].delivered_ms == pytest.approx(15)


def test_all_promises_of_one_what_if_are_forgotten_together() -> None:
    remember(promise("precision=bf16", id="aa"))
    remember(promise("precision=tf32", id="bb"))
    remember(promise("batch=x2", id="cc"))
    assert {each.id for each in forget_all_of("precision")} == {"aa", "bb"}
    assert [each.id for each in open_promises()] == ["cc"]
    with pytest.raises(UsageError, match="no prediction has that name"):
        forget_all_of("precision")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seen": (), "named": False}, "nothing shows that the predicted change was made"),
        ({"a_ms": 41.0}, "A's step takes 41.0 ms, but the prediction is about 20.0 ms"),
        ({"low": -0.7, "high": 1.27}, "between -70% and \\+127%"),
        ({"low": -1.0, "high": 1e300}, "only known"),
    ],
)
def test_a_delivery_that_would_not_be_taken_today_teaches_nothing(
    changes: dict[str, Any], why: str
) -> None:
    remember(promise())
    append(delivery(**changes))
    assert [each.id for each in open_promises()] == ["id1.0"]
    ((_, told),) = ignored_deliveries()
    assert re.search(why, told)
    assert adjust("precision", 10.0, 9.0, 11.0, history()) == (10.0, 9.0, 11.0)


def test_a_named_delivery_counts_without_evidence() -> None:
    remember(promise())
    append(delivery(seen=(), named=True))
    assert history()[0].delivery is not None
    assert ignored_deliveries() == ()


def test_a_promise_without_numbers_is_refused() -> None:
    with pytest.raises(UsageError, match="a prediction needs"):
        remember(promise(predicted_ms=0.0))


def test_names_of_what_ifs_do_not_depend_on_order_or_values() -> None:
    assert promise("b=1 a=2").name == promise("a=3 b").name == "a+b"
    assert promise("precision=bf16 batch").words == "precision=bf16 batch"


def test_summary_by_hand() -> None:
    rows = [
        kept(16.8, id="1"),  # +5%, inside
        kept(14.4, id="2"),  # -10%, outside
        kept(16.0, id="3"),  # 0
        TrackedPromise(promise=promise(id="4")),
        TrackedPromise(promise=promise("batch=16", id="5")),
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
    # errors of +10% and -10% (as logarithms) with promised half-widths of ln(17/16), ln(16/15)
    away = math.exp(0.1)
    told = [kept(16 * away), kept(16 / away)]
    moved, _, high = adjust("precision", 10.0, 9.0, 11.0, told)
    z = [0.1 / math.log(17 / 16), 0.1 / math.log(16 / 15)]
    stretch = math.sqrt((4 + sum((1.959964 * each) ** 2 for each in z)) / 6)
    assert moved == pytest.approx(10)
    assert high == pytest.approx(10 * (11 / 10) ** stretch)


@pytest.mark.parametrize("delivered", [0.001, 1.0, 500.0, 1e9])
def test_one_outlier_never_moves_a_prediction_far(delivered: float) -> None:
    """Seen: 110 ms became 148, 51 to 423, after one delivery of other work."""
    told = [kept(delivered, name="compile", low_ms=1.0, high_ms=200.0)]
    moved, low, high = adjust("compile", 110.0, 100.0, 121.0, told)
    assert abs(math.log(moved / 110)) <= math.log(1.25) / 5 + 1e-12
    assert math.log(high / low) <= 2 * math.log(121 / 100)
    narrow = adjust("precision", 110.0, 100.0, 121.0, [kept(delivered)])
    assert abs(math.log(narrow[0] / 110)) <= 2 / 5 * math.log(17 / 15)


def test_one_outlier_among_good_deliveries_is_outvoted() -> None:
    moved, _, _ = adjust("precision", 10.0, 9.0, 11.0, [*[kept(16.0)] * 4, kept(160.0)])
    assert moved == 10.0


def test_however_many_deliveries_the_record_moves_by_a_quarter_at_most() -> None:
    told = [kept(160.0, low_ms=4.0, high_ms=64.0)] * 1000
    moved, _, _ = adjust("precision", 10.0, 9.0, 11.0, told)
    assert 12.4 < moved <= 12.5


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
    from stepscope.verify.traits import describe_trace, describe_workload

    path = golden / "h200-resnet18/rank-00000/trace.json.gz"
    explained = describe_workload({}, stepscope.explain_job(path, cache=False))
    assert explained.signature is not None
    assert describe_trace(stepscope.read_trace(path)) == explained


def test_the_same_promise_is_made_once_until_it_is_answered() -> None:
    """Else one trial, compared twice, would count twice."""
    assert remember(promise(id="first")).id == "first"
    assert remember(promise(id="again", when_unix=5.0)).id == "first"
    assert [each.id for each in open_promises()] == ["first"]
    append(delivery(promise="first"))
    assert remember(promise(id="once more")).id == "once more"


# The track record on disk: many writers, torn lines, strangers.

_WRITERS, _LINES = 4, 25


def _write_many(writer: int) -> None:
    for number in range(_LINES):
        append(promise(id=f"{writer}-{number}", path="x" * 5000))


def test_lines_of_several_writers_are_all_whole() -> None:
    with multiprocessing.get_context("spawn").Pool(_WRITERS) as pool:
        pool.map(_write_many, range(_WRITERS))
    lines = read_lines()
    expected = {f"{writer}-{number}" for writer in range(_WRITERS) for number in range(_LINES)}
    assert len(lines) == _WRITERS * _LINES
    assert {line.id for line in lines} == expected  # type: ignore[union-attr]


def the_file() -> Path:
    (file,) = record_folder().glob("*.jsonl")
    return file


def test_a_torn_last_line_costs_only_itself() -> None:
    append(promise(id="one"))
    append(promise(id="two"))
    file = the_file()
    file.write_bytes(file.read_bytes()[:-20])
    assert [line.id for line in read_lines()] == ["one"]  # type: ignore[union-attr]
    append(promise(id="three"))
    assert [line.id for line in read_lines()] == ["one", "three"]  # type: ignore[union-attr]


def test_what_is_not_ours_is_left_out() -> None:
    append(promise(id="one"))
    file = the_file()
    with file.open("ab") as handle:
        handle.write(b'hello\n{"kind": "else"}\n\xff\xfe\n{"kind": "promise", "id": 3}\n')
    newer = file.read_bytes().splitlines()[0].replace(b'"schema":1', b'"schema":2')
    with file.open("ab") as handle:
        handle.write(newer + b"\n")
    assert len(read_lines()) == 1


def test_nothing_written_is_nothing_read() -> None:
    assert read_lines() == []


def test_each_host_has_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    append(promise(id="one"))
    monkeypatch.setattr("platform.node", lambda: "node/7")
    append(promise(id="two", host=node_name()))
    assert len([*record_folder().glob("*.jsonl")]) == 2
    assert (record_folder() / "node_7.jsonl").exists()
    assert len(read_lines()) == 2


def test_folder_is_the_variable_else_the_users_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert record_folder() == tmp_path / "stepscope-record"
    monkeypatch.delenv("STEPSCOPE_RECORD")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert record_folder() == tmp_path / "config/stepscope/record"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_said_with_what_to_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="Set STEPSCOPE_RECORD"):
        append(promise())


def test_a_file_in_the_folders_place_is_said_too(tmp_path: Path) -> None:
    (tmp_path / "stepscope-record").write_text("")
    with pytest.raises(UsageError, match="the track record cannot be written"):
        append(promise())


@pytest.mark.parametrize(
    "line",
    [
        delivery(a_ms=0.0),
        delivery(b_ms=0.0),
        delivery(b_ms=-3.0),
        promise(predicted_ms=0.0, low_ms=0.0),
        promise(baseline_ms=-1.0),
        promise(low_ms=18.0),
    ],
)
def test_numbers_that_no_step_has_are_left_out_counted_and_kept(line: Line) -> None:
    """Somebody edited the file: nothing can be reckoned with such a line, and it stays there."""
    append(promise(id="good"))
    append(line)
    before = the_file().read_bytes()
    assert [each.id for each in read_lines()] == ["good"]  # type: ignore[union-attr]
    assert count_unread() == 1
    append(promise(id="later"))
    assert the_file().read_bytes().startswith(before)


@pytest.mark.parametrize("how", ["pipe", "device"])
def test_a_record_that_is_no_file_is_neither_read_nor_written(how: str) -> None:
    append(promise())
    (file,) = record_folder().glob("*.jsonl")
    file.unlink()
    if how == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    assert (read_lines(), count_unread()) == ([], 1)
    with pytest.raises(UsageError, match="not a regular file"):
        append(promise())


@pytest.mark.parametrize("when", [-1.0, 1e300])
def test_a_promise_of_no_calendar_is_left_out(when: float) -> None:
    append(promise(when_unix=when))
    assert (read_lines(), count_unread()) == ([], 1)


def test_a_path_that_is_no_text_can_be_kept() -> None:
    append(promise(path=os.fsdecode(b"/runs/\xff")))
    (line,) = read_lines()
    assert isinstance(line, Promise)
    assert line.path == "/runs/?"
