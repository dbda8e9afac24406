"""A lazy pattern answers as re.compile's does, and is compiled only when it is asked."""

from __future__ import annotations

import re

import pytest

from stepscope.text.words import lazy_pattern


def test_it_answers_as_a_compiled_pattern() -> None:
    lazy, compiled = (make(r"a(\d)", re.IGNORECASE) for make in (lazy_pattern, re.compile))
    for text in ("", "xA1", "a12", "A1"):
        assert lazy.sub("b", text) == compiled.sub("b", text)
        for name in ("search", "match", "fullmatch"):
            ours, theirs = getattr(lazy, name)(text), getattr(compiled, name)(text)
            assert (ours and ours.groups()) == (theirs and theirs.groups())
    assert lazy.groups == compiled.groups


def test_it_is_compiled_once_and_only_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = []
    compile_ = re.compile

    def count(pattern: str, flags: int = 0) -> re.Pattern[str]:
        patterns.append(pattern)
        return compile_(pattern, flags)

    monkeypatch.setattr(re, "compile", count)
    lazy = lazy_pattern("lazy")
    assert patterns == []
    assert lazy.search("so lazy")
    assert lazy.match("lazy")
    assert patterns == ["lazy"]
