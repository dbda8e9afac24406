"""`stepscope record`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "verify"))

from promises import delivery, kept, promise

from stepscope.errors import UsageError
from stepscope.ui.cli.record import command
from stepscope.verify.track_record import append, record_folder


def told(*arguments: str) -> str:
    done = CliRunner().invoke(command, [*arguments], standalone_mode=False)
    if done.exception:
        raise done.exception
    return done.output


def write(delivered_ms: float, **changes: Any) -> None:
    each = kept(delivered_ms, **changes)
    append(each.promise)
    assert each.delivery is not None
    append(each.delivery)


def test_an_empty_record_says_how_to_begin() -> None:
    shown = told()
    assert "No prediction is recorded" in shown
    assert "stepscope whatif" in shown
    body = json.loads(told("--json"))
    assert body["what_ifs"] == body["promises"] == []


def test_promises_that_nobody_tried_are_open() -> None:
    append(promise(id="aa"))
    shown = told()
    assert "1 prediction, none of them measured yet" in shown
    assert "open" in shown


def test_promised_against_delivered_by_what_if() -> None:
    write(16.8, id="aa")
    write(14.4, id="bb")
    write(16.0, id="cc")
    append(promise("batch=16", id="dd"))
    shown = told()
    assert "3 predictions measured: half of them came within 5.0%" in shown
    assert "2 of 3 results lie in the predicted 95% interval" in shown
    body = json.loads(told("--json"))
    assert body["schema"] == 1
    rows = {row["name"]: row for row in body["what_ifs"]}
    assert rows["precision"]["delivered"] == 3
    assert round(rows["precision"]["median_error"], 6) == 0.05
    assert rows["batch"]["median_error"] is None
    found = {row["id"]: row for row in body["promises"]}
    assert found["bb"]["inside"] is False
    assert found["dd"]["delivery"] is None


def test_other_hosts_are_listed_on_request() -> None:
    append(promise(id="aa", host="elsewhere"))
    assert "No prediction is recorded" in told()
    assert "aa" in told("--every-host")


def test_lines_that_cannot_be_read_are_told_and_kept() -> None:
    write(16.5)
    (file,) = record_folder().glob("*.jsonl")
    file.write_bytes(b"\xff\x00 not ours\n" + file.read_bytes() + b"{}\n")
    before = file.read_bytes()
    assert "2 lines of the record cannot be read" in " ".join(told().split())
    body = json.loads(told("--json"))
    assert (body["unread_lines"], len(body["promises"])) == (2, 1)
    assert file.read_bytes() == before


def test_forget_takes_ids_or_a_name_and_says_what_went() -> None:
    write(16.5, id="aa")
    append(promise("batch=16", id="bb"))
    append(promise("batch=32", id="cc"))
    assert told("forget", "aa", "--delivery").split()[-3:] == ["is", "open", "again"]
    assert json.loads(told("--json"))["promises"][0]["delivery"] is None
    assert told("forget", "aa") == "removed aa (precision=bf16)\n"
    assert told("forget", "--all-of", "batch").count("removed") == 2
    assert "No prediction is recorded" in told()
    for wrong in (("forget",), ("forget", "aa", "--all-of", "batch")):
        with pytest.raises(UsageError, match="ids of predictions to forget"):
            told(*wrong)


def test_nothing_is_forgotten_where_one_id_is_wrong() -> None:
    append(promise(id="aa"))
    with pytest.raises(UsageError, match="no prediction has that id"):
        told("forget", "aa", "zz")
    assert json.loads(told("--json"))["promises"]


def test_a_delivery_that_does_not_count_is_told() -> None:
    append(promise(id="aa"))
    append(delivery(promise="aa", seen=()))
    shown = " ".join(told().split())
    assert "a result for aa (20.0 -> 16.0 ms) does not count: nothing shows" in shown
    body = json.loads(told("--json"))
    assert [row["promise"] for row in body["ignored"]] == ["aa"]
    assert body["promises"][0]["delivery"] is None
