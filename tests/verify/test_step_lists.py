"""Step times that somebody wrote down."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.verify.runs import is_step_list, read_step_list


def read(tmp_path: Path, name: str, text: str, **options: str) -> list[float]:
    path = tmp_path / name
    path.write_text(text)
    assert is_step_list(path)
    return read_step_list(path, **options).tolist()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("steps.txt", "# milliseconds\n12.5\n13\n\n12.75\n"),
        ("steps.txt", "12.5 13 12.75"),
        ("steps.txt", "12.5 ms\n0.013 s\n12750us\n"),
        ("steps.txt", "\ufeff12.5, 13, 12.75\n"),
        ("steps.csv", "12.5\n13\n12.75\n"),
        ("steps.csv", "step,step_ms\n0,12.5\n1,13\n2,12.75\n"),
        ("steps.csv", "epoch;time_s\n1;0.0125\n1;0.013\n1;0.01275\n"),
        ("steps.tsv", "loss\tms\n3.1\t12.5\n3.0\t13\n2.9\t12.75\n"),
        ("steps.json", "[12.5, 13, 12.75]"),
        ("steps.json", '{"loss": "0x1p3", "steps_s": [0.0125, 0.013, 0.01275], "peak": null}'),
        ("steps.json", '[{"step_ns": 12500000}, {"step_ns": 13000000}, {"step_ns": 12750000}]'),
        ("steps.jsonl", "12.5\n13\n12.75\n"),
        ("steps.jsonl", '{"ms": 12.5}\n{"ms": 13}\n{"ms": 12.75}\n{"ms": 1'),
    ],
)
def test_every_form_gives_milliseconds(tmp_path: Path, name: str, text: str) -> None:
    assert read(tmp_path, name, text) == pytest.approx([12.5, 13, 12.75])


def test_unit_is_the_callers_where_the_file_does_not_say(tmp_path: Path) -> None:
    assert read(tmp_path, "a.txt", "1\n2\n", unit="s") == [1000, 2000]
    assert read(tmp_path, "a.csv", "step_ms\n1\n2\n", unit="s") == [1, 2]


def test_column_is_chosen_by_name(tmp_path: Path) -> None:
    text = "forward_ms,backward_ms\n1,2\n3,4\n"
    assert read(tmp_path, "a.csv", text, column="backward_ms") == [2, 4]
    with pytest.raises(UsageError, match=r"--column forward_ms\|backward_ms"):
        read(tmp_path, "a.csv", text)
    with pytest.raises(UsageError, match="has no column nothing"):
        read(tmp_path, "a.csv", text, column="nothing")
    with pytest.raises(UsageError, match="has no columns"):
        read(tmp_path, "a.txt", "1\n2\n", column="x")


def test_columns_without_names_are_numbered(tmp_path: Path) -> None:
    assert read(tmp_path, "a.csv", "0,12\n1,13\n", column="2") == [12, 13]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "", "holds no step times"),
        ("a.txt", "1\ntwo\n", "line 2: 'two' is not a step time"),
        ("a.txt", "1\n-3\n", "line 2: '-3' is not a step time"),
        ("a.txt", "1\nnan\n", "line 2"),
        ("a.csv", "ms\n1\n0\n", "line 3: '0' is not a step time"),
        ("a.jsonl", "1\nx\n3\n", "line 2"),
        ("a.jsonl", "1\ntrue\n", "line 2: True is not a step time"),
    ],
)
def test_what_is_no_step_time_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UnreadableInputError, match=says) as error:
        read_step_list(path)
    assert str(path) in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UnreadableInputError, match="is not text"):
        read_step_list(path)


def test_a_trace_is_no_step_list(tmp_path: Path) -> None:
    event = {"ph": "X", "name": "x", "ts": 1, "dur": 1}
    for content in ({"traceEvents": [event]}, [event], {"a": 1}, [], "x"):
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(content))
        assert not is_step_list(path)
    path.write_text("{broken")
    assert not is_step_list(path)
    assert not is_step_list(Path(__file__))


def test_a_list_of_numbers_is_one_however_long_or_marked(tmp_path: Path) -> None:
    """A JSON list beyond 8 MiB is not taken for a trace, nor is one with a byte order mark."""
    path = tmp_path / "long.json"
    path.write_text("[" + ",".join(["12.34567890123"] * 700_000) + "]")
    assert path.stat().st_size > 8 << 20
    assert is_step_list(path)
    assert len(read_step_list(path)) == 700_000
    path.write_text("\ufeff[12.5, 13]", encoding="utf-8")
    assert is_step_list(path)
    assert read_step_list(path).tolist() == [12.5, 13]


def test_a_list_that_was_cut_says_so(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text("[12.5, 13, 12.")
    assert is_step_list(path)
    with pytest.raises(UnreadableInputError, match="is incomplete"):
        read_step_list(path)


def test_a_step_of_thousands_of_years_is_none(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="line 2: '1e300' is not a step time"):
        read(tmp_path, "a.txt", "1\n1e300\n")


# What is no list, or no file.


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.tsv", "a.jsonl", "a.json"])
def test_a_pipe_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UnreadableInputError, match="not a regular file"):
        read_step_list(tmp_path / name)
    is_step_list(tmp_path / name)


def test_a_device_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").symlink_to("/dev/zero")
    with pytest.raises(UnreadableInputError, match="not a regular file"):
        read_step_list(tmp_path / "a.csv")


def test_a_list_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(UnreadableInputError, match="larger than 64 MiB"):
        read_step_list(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "[" * 100_000),
        ("a.jsonl", "[" * 100_000 + "\n1\n"),
        ("a.json", "[1, " + "9" * 400 + "]"),
        ("a.json", "[1, " + "9" * 5000 + "]"),
        ("a.jsonl", '{"step_ms": 1}\n"x"\n{"step_ms": 2}\n'),
        ("a.jsonl", '{"step_ms": 1}\n[3]\n{"step_ms": 2}\n'),
        ("a.csv", "step_ms\n" + "9" * 200_000 + "\n"),
        ("a.csv", 'step_ms,x\n1,"' + "y" * 200_000 + '"\n2,3\n"\n'),
        ("a.txt", "1\n" + "8" * 400 + "\n"),
        ("a.txt", "nan\n"),
        ("a.txt", "1e400\n"),
        ("a.json", "5"),
        ("a.json", '{"a": "b"}'),
    ],
)
def test_what_is_no_step_time_is_told_in_a_short_sentence(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UnreadableInputError) as caught:
        read_step_list(tmp_path / name)
    assert len(str(caught.value)) < len(str(tmp_path)) + 300


def test_plain_numbers_between_named_ones_count(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"step_ms": 1}\n5\n{"step_ms": 2}\n')
    assert read_step_list(tmp_path / "a.jsonl").tolist() == [1, 5, 2]
