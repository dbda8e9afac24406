"""Brackets and quotes alone show where events end, also in text that does not decode."""

from __future__ import annotations

from stepscope.trace.formats.json_brackets import scan_brackets


def test_a_scan_tells_complete_from_unfinished_from_damaged_text() -> None:
    assert scan_brackets(b'{"a": [1, "]}"]}, {"b": 2}').complete
    assert scan_brackets(b'{"a": "}, {", "b": {}}, {"c": 1}').cuts == [(22, 24)]
    assert scan_brackets(b'{"a": [{"b": 1}').open_brackets == b"{["
    assert scan_brackets(b'{"a": "text').in_string
    assert scan_brackets(b'{"a": 1}] , "b": 2}').closed_at == 8
    assert scan_brackets(b'{"a": [1}').mismatched
    assert scan_brackets(b"{}}").mismatched
