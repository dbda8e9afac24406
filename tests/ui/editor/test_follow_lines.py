"""Measured lines through edits: current, moved, stale or gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.records.source_lines import LineCost, LineCosts
from stepscope.ui.editor.edits import follow

FILE = Path("/work/train.py")
TEXT = "import torch\nx = model(a)\ny = x.relu()\nloss = y.sum()\nloss.backward()\n"


def costs(*lines: int, text: str | None = TEXT) -> LineCosts:
    return LineCosts(
        lines=tuple(LineCost(file=str(FILE), line=n, function="main", other_ms=1) for n in lines),
        step_ms=10,
        texts={} if text is None else {str(FILE): text},
    )


def states(text: str, before: LineCosts | None = None) -> dict[int, tuple[str, int | None]]:
    followed = follow(before or costs(2, 3, 4, 5), FILE, text)
    return {one.cost.line: (one.state, one.line) for one in followed.lines}


def test_an_unchanged_text_is_current() -> None:
    assert states(TEXT) == {n: ("current", n) for n in (2, 3, 4, 5)}
    assert not follow(costs(2), FILE, TEXT).is_changed


def test_lines_after_an_inserted_one_move() -> None:
    text = TEXT.replace("y = x", "print(x)\ny = x")
    expected = {2: ("current", 2), 3: ("moved", 4), 4: ("moved", 5), 5: ("moved", 6)}
    assert states(text) == expected


def test_an_edited_line_is_stale_and_a_removed_one_gone() -> None:
    assert states(TEXT.replace("x.relu()", "x.gelu()"))[3] == ("stale", 3)
    without = TEXT.replace("y = x.relu()\n", "")
    assert states(without) == {
        2: ("current", 2),
        3: ("gone", None),
        4: ("moved", 3),
        5: ("moved", 4),
    }
    assert follow(costs(3), FILE, without).is_changed


def test_a_line_moved_into_a_block_is_stale() -> None:
    text = TEXT.replace("y = x.relu()", "for _ in range(3):\n    y = x.relu()")
    assert states(text)[3] == ("stale", 4)
    assert states(text)[4] == ("moved", 5)


def test_without_the_measured_text_nothing_is_current() -> None:
    assert states(TEXT, costs(2, 3, text=None)) == {2: ("stale", 2), 3: ("stale", 3)}


def test_lines_end_where_python_ends_them() -> None:
    odd = TEXT.replace("import torch", "import torch  # \x0c \u2028")
    assert states(odd, costs(3, text=odd)) == {3: ("current", 3)}
    assert states(TEXT.replace("\n", "\r\n")) == {n: ("current", n) for n in (2, 3, 4, 5)}


def test_other_files_are_not_followed_here() -> None:
    assert follow(costs(2), Path("/work/other.py"), TEXT).lines == ()


@pytest.mark.parametrize("text", ["", "\n", "x"])
def test_an_emptied_file_keeps_no_line(text: str) -> None:
    assert {state for state, _ in states(text).values()} <= {"gone", "stale"}


def test_a_line_beyond_the_kept_text_is_gone() -> None:
    assert states("x\n", costs(99, text="x\n")) == {99: ("gone", None)}
