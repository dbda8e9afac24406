"""Slips of a profiler's pen: text that is almost JSON -> JSON that says the same.

Knows only text: bare nan and inf, numbers no double can hold, stray backslashes, raw control
characters, broken UTF-8, lone surrogates, quotes inside names that nobody escaped. All of it is
for text that a decoder has already refused; valid JSON comes back with its meaning unchanged.
"""

from __future__ import annotations

import re

from stepscope.trace.json_pieces import STRING

_ABSENT = (
    rb"(?<=[:,\[\s])(?:"
    rb"[-+]?(?:nan(?:\([^()]*\))?|inf(?:inity)?|1\.\#(?:inf|ind|qnan))"
    rb"|-?[0-9.]++e\+?[0-9]{3,}|-?[0-9]{300,}+(?:\.[0-9]*)?"
    rb")(?=\s*+(?:[,\]}]|\Z))"
)
_CONTROL = rb"\x00-\x08\x0b\x0c\x0e-\x1f"
_TO_SLIP = re.compile(
    rb'(?:"[^"\\\x00-\x1f]*+"|[^"nNiI+\-0-9' + _CONTROL + rb"]++"
    rb"|(?!" + _ABSENT + rb")[nNiI+\-0-9]++)*+"
    rb"(?:(?P<string>" + STRING + rb")|(?P<absent>" + _ABSENT + rb")"
    rb"|(?P<control>[" + _CONTROL + rb"]++))",
    re.IGNORECASE | re.DOTALL,
)
_ESCAPE = re.compile(
    rb"(?P<pair>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
    rb'|(?P<good>\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))'
    rb"|(?P<control>[\x00-\x1f])"
    rb"|(?P<stray>\\)"
)
_NAME_OPENS = re.compile(rb'"(?:name|cat)"\s*:\s*"')
_IN_NAME = re.compile(
    rb'\\.|"(?P<closes>(?=\s*+(?:,\s*+"[^"]{1,60}+"\s*+:|\}\s*+(?:[,\]}]|\Z))))?', re.DOTALL
)


def mend(text: bytes) -> bytes:
    """The text with every known slip put right, except quotes."""
    if not text.isascii():
        text = text.decode("utf-8", "replace").encode()
    mended, position = bytearray(), 0
    while found := _TO_SLIP.match(text, position):  # anchored: what is clean is passed over once
        slip = found.start(found.lastgroup or 0)
        mended += text[position:slip]
        mended += _put_right(found)
        position = found.end()
    return bytes(mended + text[position:]) if position else text


def escape_quotes(text: bytes) -> bytes:
    """One event's text with the quotes inside its name and category escaped.

    Such a value ends at the quote that another key follows, or the end of the object.
    """
    parts, position = bytearray(), 0
    while opens := _NAME_OPENS.search(text, position):
        done = opens.end()
        parts += text[position:done]
        for found in _IN_NAME.finditer(text, done):
            if found["closes"] is not None:
                break
            if found[0] == b'"':
                parts += text[done : found.start()] + rb"\""
                done = found.end()
        else:
            return text  # a value without an end: no quote of it can be told from another
        if b'"ph"' in text[opens.end() : found.start()]:
            return text  # not a name but the event itself: something else is missing
        parts += text[done : found.end()]
        position = found.end()
    return bytes(parts + text[position:]) if position else text


def _put_right(found: re.Match[bytes]) -> bytes:
    if found.lastgroup == "string":
        return _ESCAPE.sub(_escape, found["string"])
    return b"null" if found.lastgroup == "absent" else b" "


def _escape(match: re.Match[bytes]) -> bytes:
    if match.lastgroup == "control":
        return b"\\u%04x" % match[0][0]
    if match.lastgroup == "stray":
        return rb"\\"
    return rb"\ufffd" if match.lastgroup == "lone" else match[0]
