"""Whose turn it is, and which runs belong together."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.verify.pairs import AB, PairedRuns, plan_pairs, read_pairs


def test_every_two_pairs_are_a_b_b_a_or_the_other_way_round() -> None:
    firsts = "".join(pair.first for pair in plan_pairs(200, seed=3))
    twos = {firsts[place : place + 2] for place in range(0, 200, 2)}
    assert twos == {"ab", "ba"}


def test_the_order_is_the_seeds() -> None:
    assert plan_pairs(20, seed=1) == plan_pairs(20, seed=1)
    assert plan_pairs(20, seed=1) != plan_pairs(20, seed=2)


def test_folders_sort_as_they_ran() -> None:
    names = [pair.a for pair in plan_pairs(120)]
    assert names == sorted(names)
    assert names[0] == "a-001"


def write(folder: Path, done: tuple[bool, ...]) -> None:
    pairs = tuple(
        msgspec.structs.replace(pair, done=is_done)
        for pair, is_done in zip(plan_pairs(len(done)), done, strict=True)
    )
    turns = PairedRuns(command_a=("a",), command_b=("b",), pairs=pairs)
    (folder / AB).write_bytes(msgspec.json.encode(turns))


def test_only_finished_pairs_are_compared(tmp_path: Path) -> None:
    write(tmp_path, (True, False, True))
    a, b = read_pairs(tmp_path)
    assert [Path(path).name for path in a] == ["a-01", "a-03"]
    assert [Path(path).name for path in b] == ["b-01", "b-03"]


def test_not_one_finished_pair_is_not_captured(tmp_path: Path) -> None:
    write(tmp_path, (False,))
    with pytest.raises(NotCapturedError, match="no pair of runs has finished"):
        read_pairs(tmp_path)


def test_something_else_of_that_name_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / AB).write_text("{}")
    with pytest.raises(UnreadableInputError, match="was not written by stepscope ab"):
        read_pairs(tmp_path)
    with pytest.raises(UnreadableInputError):
        read_pairs(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["[" * 100_000, "", '{"pairs": 3}', "\ud800"])
def test_a_damaged_plan_is_an_error_of_ours(tmp_path: Path, content: str) -> None:
    (tmp_path / "ab.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(UnreadableInputError, match="not written by stepscope ab"):
        read_pairs(tmp_path)


def test_a_plan_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ab.json")
    with pytest.raises(UnreadableInputError, match="not a regular file"):
        read_pairs(tmp_path)
