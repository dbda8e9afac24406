"""Repairs change the text that a decoder refuses, never the meaning of valid text."""

from __future__ import annotations

import json

import pytest

from stepscope.trace.formats.json_brackets import escape_quotes, repair


@pytest.mark.parametrize(
    "text", [b'{"a": "b\\\\c \\u00e9 \\ud83d\\ude00 nan", "n": [1.5, -2e10, true]}', b'{"a": 1}']
)
def test_repair_leaves_the_meaning_of_valid_text_alone(text: bytes) -> None:
    assert json.loads(repair(text)) == json.loads(text)
    assert escape_quotes(text) == text


def test_a_name_does_not_swallow_the_event_after_it() -> None:
    text = b'{"name": "a", "ph" "X", "ts": 5, "dur": 1}'
    assert escape_quotes(text) == text
