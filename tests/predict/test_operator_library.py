"""The library of operator times: kept, looked up, carried on, and worked without."""

from __future__ import annotations

import math
import sqlite3
from typing import Any

import pytest
from msgspec.structs import replace

from stepscope.predict.operator_library import (
    KnownTimes,
    LibraryProblemError,
    library_file,
    read_times,
    save_times,
)
from stepscope.records.hardware import OperatorCall, OperatorTime, Output, PassTime


def linear(batch: int = 8, **changes: Any) -> OperatorCall:
    call = OperatorCall(
        name="aten::linear",
        shapes=f"[[{batch},64],[32,64],[32]]",
        strides="[[64,1],[64,1],[1]]",
        dtypes='["float","float","float"]',
        concrete='["","",""]',
        grads="111",
    )
    return replace(call, **changes)


def time_of(call: OperatorCall, ns: float, software: str = "torch 2.9") -> OperatorTime:
    return OperatorTime(
        call=call,
        outputs=(Output((8, 32), "float", True),),
        forward=PassTime(ns=ns, spread=0.01, repeats=9),
        backward=PassTime(ns=2 * ns, spread=0.02, repeats=9),
        place="NVIDIA H200",
        software=software,
    )


def test_times_come_back_as_they_were_saved_and_newer_ones_replace_older() -> None:
    described_only = replace(time_of(linear(3), 1.0), forward=None, backward=None)
    save_times([time_of(linear(), 100.0), described_only])
    save_times([time_of(linear(), 120.0)])
    by_call = {time.call: time for time in read_times()}
    assert by_call == {linear(): time_of(linear(), 120.0), linear(3): described_only}
    assert read_times(place="another") == []


def test_a_library_that_was_never_written_is_empty_and_stays_unwritten() -> None:
    assert read_times() == []
    assert not library_file().exists()


def test_a_damaged_library_says_so() -> None:
    library_file().parent.mkdir(parents=True)
    library_file().write_bytes(b"no database at all" * 100)
    for use in (read_times, lambda: save_times([time_of(linear(), 1.0)])):
        with pytest.raises(LibraryProblemError, match="is damaged"):
            use()


def test_a_row_that_cannot_be_read_is_damage() -> None:
    save_times([time_of(linear(), 1.0)])
    with sqlite3.connect(library_file()) as store:
        store.execute("UPDATE operator_times SET outputs = '[7]'")
    with pytest.raises(LibraryProblemError, match="is damaged"):
        read_times()


def test_a_locked_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.predict.operator_library._WAIT_S", 0.01)
    save_times([time_of(linear(), 1.0)])
    writer = sqlite3.connect(library_file(), isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(LibraryProblemError, match="locked by another process"):
            save_times([time_of(linear(), 2.0)])
    finally:
        writer.close()


def test_the_same_call_with_the_same_software_is_exact() -> None:
    known = KnownTimes([time_of(linear(), 100.0)], ["torch 2.9"]).find(linear())
    assert known is not None
    assert known.basis == "probed"
    # Forward 100 ± 1, backward 200 ± 4.
    assert known.error == pytest.approx(math.hypot(1, 4) / 300)


def test_other_software_is_a_neighbour() -> None:
    known = KnownTimes([time_of(linear(), 100.0, "torch 2.8")], ["torch 2.9"]).find(linear())
    assert known is not None
    assert known.basis == "remembered"
    assert known.error > 0.08
    assert KnownTimes([time_of(linear(), 100.0)], []).find(linear()) is not None


def test_a_time_between_two_batches_lies_between_their_times() -> None:
    known = KnownTimes([time_of(linear(8), 100.0), time_of(linear(32), 400.0)], []).find(linear(16))
    assert known is not None
    assert known.basis == "remembered"
    assert known.time.forward is not None
    assert known.time.forward.ns == pytest.approx(200.0)
    assert 0.05 < known.error < 0.1


def test_beyond_one_neighbour_the_error_is_larger_and_far_away_nothing_is_known() -> None:
    known = KnownTimes([time_of(linear(8), 100.0)], [])
    beside = known.find(linear(16))
    assert beside is not None
    assert beside.time.forward is not None
    assert beside.time.forward.ns == pytest.approx(200.0)
    assert beside.error > 0.2
    assert known.find(linear(32)) is None


@pytest.mark.parametrize(
    "other",
    [
        {"mode": "bf16"},
        {"dtypes": '["c10::Half","float","float"]'},
        {"grads": "011"},
        {"strides": "[[1,64],[64,1],[1]]"},
        {"shapes": "[[16,64],[48,64],[48]]"},
    ],
)
def test_another_call_is_no_neighbour(other: dict[str, Any]) -> None:
    known = KnownTimes([time_of(linear(8), 100.0), time_of(linear(32), 400.0)], [])
    assert known.find(linear(16, **other)) is None
