"""Repair text that is almost JSON: the known slips of profilers, put right with the same meaning.

Bare nan and inf, numbers that no double can hold, stray backslashes, raw control characters, broken
UTF-8, lone surrogates, unescaped quotes inside names. It is for text that a decoder has already
refused; valid JSON keeps its meaning.
"""

from __future__ import annotations

import re

from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.trace.json_brackets import STRING

_ABSENT = (
    rb"(?<=[:,\[\s])(?:"
    rb"[-+]?(?:nan(?:\([^()]*\))?|inf(?:inity)?|1\.\#(?:inf|ind|qnan))"
    rb"|-?[0-9.]++e\+?[0-9]{3,}|-?[0-9]{300,}+(?:\.[0-9]*)?"
    rb")(?=\s*+(?:[,\]}]|\Z))"
)
_CONTROL = rb"\x00-\x08\x0b\x0c\x0e-\x1f"
_TO_SLIP = lazy_pattern(
    rb'(?:"[^"\\\x00-\x1f]*+"|[^"nNiI+\-0-9' + _CONTROL + rb"]++"
    rb"|(?!" + _ABSENT + rb")[nNiI+\-0-9]++)*+"
    rb"(?:(?P<string>" + STRING + rb")|(?P<absent>" + _ABSENT + rb")"
    rb"|(?P<control>[" + _CONTROL + rb"]++))",
    re.IGNORECASE | re.DOTALL,
)
_ESCAPE = lazy_pattern(
    rb"(?P<pair>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
    rb'|(?P<good>\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))'
    rb"|(?P<control>[\x00-\x1f])"
    rb"|(?P<stray>\\)"
)
_NAME_OPENS = lazy_pattern(rb'"(?:name|cat)"\s*:\s*"')
_IN_NAME = lazy_pattern(
    rb'\\.|"(?P<closes>(?=\s*+(?:,\s*+"[^"]{1,60}+"\s*+:|\}\s*+(?:[,\]}]|\Z))))?', re.DOTALL
)


def repair(text: bytes) -> bytes:
    """Put every known slip right, except quotes."""
    if not text.isascii():
        text = text.decode("utf-8", "replace").encode()
    repaired, position = bytearray(), 0
    while match := _TO_SLIP.match(text, position):  # anchored: clean text is passed only once
        slip = match.start(match.lastgroup or 0)
        repaired += text[position:slip]
        repaired += _replacement(match)
        position = match.end()
    return bytes(repaired + text[position:]) if position else text


def escape_quotes(text: bytes) -> bytes:
    """Escape the quotes inside the name and category of one event.

    A name ends at the quote that is followed by another key or by the end of the object.
    """
    parts, position = bytearray(), 0
    while opens := _NAME_OPENS.search(text, position):
        done = opens.end()
        parts += text[position:done]
        for match in _IN_NAME.finditer(text, done):
            if match["closes"] is not None:
                break
            if match[0] == b'"':
                parts += text[done : match.start()] + rb"\""
                done = match.end()
        else:
            return text  # the name has no end: its quotes cannot be told from others
        if b'"ph"' in text[opens.end() : match.start()]:
            return text  # not a name but the event itself: something else is missing
        parts += text[done : match.end()]
        position = match.end()
    return bytes(parts + text[position:]) if position else text


def _replacement(slip: re.Match[bytes]) -> bytes:
    if slip.lastgroup == "string":
        return _ESCAPE.sub(_repair_escape, slip["string"])
    return b"null" if slip.lastgroup == "absent" else b" "


def _repair_escape(match: re.Match[bytes]) -> bytes:
    if match.lastgroup == "control":
        return b"\\u%04x" % match[0][0]
    if match.lastgroup == "stray":
        return rb"\\"
    return rb"\ufffd" if match.lastgroup == "lone" else match[0]
