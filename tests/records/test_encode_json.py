"""Every value becomes valid UTF-8."""

from __future__ import annotations

import msgspec

from stepscope.records.quality import Note, encode_json, replace_invalid


def test_text_outside_utf_8_becomes_question_marks() -> None:
    note = Note(id="path\udcff", detail="a\ud800b")
    assert msgspec.json.decode(encode_json(note)) == {
        "id": "path?",
        "detail": "a?b",
        "count": None,
        "byte_offset": None,
    }
    assert encode_json({"path\udcff": ["\udcfe", 1, float("nan")]}) == b'{"path?":["?",1,null]}'


def test_valid_text_stays() -> None:
    assert replace_invalid("é ☃ 😀") == "é ☃ 😀"
    assert encode_json(["é"]) == '["é"]'.encode()
