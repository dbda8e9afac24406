"""Which of the user's lines, and which call on them, led to a place."""

from __future__ import annotations

from pathlib import Path

from stepscope.fix.watch_script import users_frames
from stepscope.records.script_facts import Frame


def who_calls() -> Frame:
    return users_frames()[1]


def called(frame: Frame) -> str:
    """The text of the line up to where the call ends."""
    assert frame.ends is not None
    line, column = frame.ends
    text = Path(frame.file).read_bytes().splitlines()[line - 1]
    return text[:column].decode().strip()


def test_calls_on_one_line_are_told_apart() -> None:
    one, two = who_calls(), who_calls()
    assert one.line == two.line
    assert called(one) == "one, two = who_calls()"
    assert called(two) == "one, two = who_calls(), who_calls()"


def test_a_call_over_lines_ends_at_its_bracket() -> None:
    frame = who_calls(
        # nothing is given
    )
    assert frame.function.endswith("its_bracket")
    assert called(frame) == ")"


def test_columns_count_bytes() -> None:
    größe = [who_calls(), "ä"]
    frame = größe[0]
    assert isinstance(frame, Frame)
    assert called(frame) == "größe = [who_calls()"
