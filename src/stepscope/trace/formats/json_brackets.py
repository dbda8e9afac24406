"""Follow the brackets and quotes of JSON text that may be damaged, and repair the known
slips of profilers. Nothing is decoded here.
"""

from __future__ import annotations

import re

import msgspec

from stepscope.text.words import lazy_pattern

# Follow the brackets and quotes of JSON text: where an event ends, where the next one begins.
#
# Nothing is decoded here, so damaged text can be followed as far as its brackets pair.

STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
SEPARATORS = b" \r\n\t,"  # what may stand between two events
ANY_BOUNDARY = lazy_pattern(rb"\}\s*+,\s*+(?=\{)")
_EVENT_KEYS = rb"(?:ph|cat|name|pid|tid|ts|dur|id|args|bp|s|tts|cname)"
EVENT_BOUNDARY = lazy_pattern(rb'\}[\s,]*+(?=\{\s*+"' + _EVENT_KEYS + rb'"\s*:)')
EVENTS_KEY = lazy_pattern(rb'"traceEvents"\s*:\s*\[')

_KINETO_BOUNDARY = b"\n  },\n  {"
_KEY = b'"traceEvents"'
_PLAIN = rb'[^"{}\[\]]++'
_TOKEN = lazy_pattern(
    rb"(?:" + _PLAIN + rb"|(?!" + _KEY + rb")" + STRING + rb")*+([{\[]++|[}\]]++|" + _KEY + rb'|")',
    re.DOTALL,
)
_RUN = rb'(\{++|\[++|\}++|\]++|")'
_OUTERMOST = lazy_pattern(rb"(?:" + _PLAIN + rb"|" + STRING + rb")*+" + _RUN, re.DOTALL)
_INNER = lazy_pattern(
    rb"(?:" + _PLAIN + rb"|" + STRING + rb"|\[(?:" + _PLAIN + rb"|" + STRING + rb")*+\]"
    rb"|\{(?:" + _PLAIN + rb"|" + STRING + rb")*+\})*+" + _RUN,
    re.DOTALL,
)  # inside an open bracket: skips the innermost lists and objects as well
_REST_OF_STRING = lazy_pattern(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_AFTER_LIST = lazy_pattern(rb'\s*+(?:,\s*+"|\}|\Z)')
_QUOTE, _LIST_CLOSES, _OPENING = b'"'[0], b"]"[0], b"{["
_OPENER_OF = {b"}"[0]: b"{", b"]"[0]: b"["}
_MAX_DEPTH = 1 << 20  # deeper nesting is not followed
_NEAR_END_BYTES = 8 << 10
SEARCH_BACK_BYTES = 1 << 20


class EventsKeySearch:
    """Search a growing buffer for the list of events among the outermost keys."""

    def __init__(self, position: int) -> None:
        self._position, self._depth = position, 0
        self.lost = False  # nested too deeply to go on

    def find(self, text: bytes) -> int | None:
        """Return where the first event begins. None: search again when there is more text."""
        while token := _TOKEN.match(text, self._position):
            run, self._position = token[1], token.start(1)
            if run == b'"':
                return None  # this string is not complete yet
            if run != _KEY:
                self._depth += len(run) if run[0] in _OPENING else -len(run)
                self.lost = self._depth > _MAX_DEPTH
                if self.lost:
                    return None
            elif self._depth == 1:
                if opens := EVENTS_KEY.match(text, self._position):
                    return opens.end()
                if not text[token.end() :].strip(b" \r\n\t:"):
                    return None
            self._position = token.end()
        return None


class EventWalk:
    """Follow the brackets and quotes of one event over a growing buffer, without keeping text."""

    def __init__(self) -> None:
        self.position = 0  # the buffer was followed up to here
        self.end: int | None = None  # just after the event
        self.closed_at: int | None = None  # the list's closing bracket, found instead of an event
        self.lost = False  # the brackets do not pair
        self._open = bytearray()
        self._in_string = False

    @property
    def resume(self) -> int:
        """Return where to read on: after the event, or at the bracket that closes the list."""
        return (self.closed_at if self.end is None else self.end) or 0

    def is_settled(self, text: bytes) -> bool:
        """Whether the event's end is known, or known to be lost. False: more text is needed."""
        while not self.lost and self.end is None and self.closed_at is None:
            if self._in_string and not self._leave_string(text):
                return False
            match = (_INNER if self._open else _OUTERMOST).match(text, self.position)
            if match is None:
                self.position = len(text)
                return False
            self.position = match.end()
            self._step(match[1])
        return True

    def _leave_string(self, text: bytes) -> bool:
        rest = _REST_OF_STRING.match(text, self.position)
        self.position = rest.end() if rest else self.position
        if text[self.position : self.position + 1] != b'"':
            return False  # a backslash at the end is read again together with what follows it
        self.position += 1
        self._in_string = False
        return True

    def _step(self, run: bytes) -> None:
        if run[0] == _QUOTE:
            self._in_string = True
        elif run[0] in _OPENING:
            self._open += run
            self.lost = len(self._open) > _MAX_DEPTH
        elif not self._open and run[0] == _LIST_CLOSES:
            self.closed_at = self.position - len(run)
        else:
            paired = min(len(run), len(self._open))
            openers = self._open[len(self._open) - paired :]
            del self._open[len(self._open) - paired :]
            if not paired or openers != _OPENER_OF[run[0]] * paired:
                self.lost = True
            elif not self._open:
                self.end = self.position - len(run) + paired


class BracketScan(msgspec.Struct, frozen=True, kw_only=True):
    """What brackets and quotes alone say about comma-separated events."""

    cuts: list[tuple[int, int]]  # between events: where one ends, where the next begins
    closed_at: int | None = None  # the bracket that ends the list of events
    open_brackets: bytes = b""
    in_string: bool = False
    mismatched: bool = False

    @property
    def complete(self) -> bool:
        """The text ends exactly where its last event does."""
        return self.closed_at is None and not self.unfinished and not self.mismatched

    @property
    def unfinished(self) -> bool:
        """More text may complete it."""
        return not self.mismatched and (self.in_string or bool(self.open_brackets))

    @property
    def in_inner_list(self) -> bool:
        """The text ends between elements of a list inside an event."""
        return self.unfinished and not self.in_string and self.open_brackets[1:].endswith(b"[")


def scan_brackets(text: bytes, open_brackets: bytes = b"") -> BracketScan:
    """Scan events; `open_brackets` are those already open where the text begins."""
    cuts: list[tuple[int, int]] = []
    stack = bytearray(open_brackets)
    position = 0
    while match := (_INNER if stack else _OUTERMOST).match(text, position):
        position = match.end()
        run = match[1]
        if run[0] in _OPENING:
            stack += run
        elif run[0] == _QUOTE:
            return BracketScan(cuts=cuts, open_brackets=bytes(stack), in_string=True)
        else:
            paired = min(len(run), len(stack))
            if stack[len(stack) - paired :] != _OPENER_OF[run[0]] * paired:
                return BracketScan(cuts=cuts, mismatched=True)
            if paired < len(run):
                end = position - len(run) + paired
                closes = run[0] == _LIST_CLOSES and _AFTER_LIST.match(text, end + 1)
                closed_at = end if closes else None
                return BracketScan(cuts=cuts, closed_at=closed_at, mismatched=not closes)
            del stack[len(stack) - paired :]
            if not stack and (cut := ANY_BOUNDARY.match(text, position - 1)):
                cuts.append((position, cut.end()))
    return BracketScan(cuts=cuts, open_brackets=bytes(stack))


def event_boundaries(text: bytes) -> list[tuple[int, int]]:
    """Return where one event ends and the next begins.

    The keys that events begin with show it even in damaged text; without them, brackets are paired.
    """
    cuts = [(match.start() + 1, match.end()) for match in EVENT_BOUNDARY.finditer(text)]
    return cuts or scan_brackets(text).cuts


def last_boundary(text: bytes, *, everywhere: bool = False) -> tuple[int, int] | None:
    """The last place where an event seems to end, searched back from the end of the text."""
    position = text.rfind(_KINETO_BOUNDARY)
    if position >= 0:
        return position + 4, position + len(_KINETO_BOUNDARY) - 1
    for pattern in (EVENT_BOUNDARY, ANY_BOUNDARY):
        for reach in (_NEAR_END_BYTES, SEARCH_BACK_BYTES, *([len(text)] if everywhere else [])):
            matches = list(pattern.finditer(text, max(0, len(text) - reach)))
            if matches:
                return matches[-1].start() + 1, matches[-1].end()
    return None


# Repair text that is almost JSON: the known slips of profilers, put right with the same meaning.
#
# Bare nan and inf, numbers that no double can hold, stray backslashes, raw control characters,
# broken UTF-8, lone surrogates, unescaped quotes inside names. It is for text that a decoder has
# already refused; valid JSON keeps its meaning.

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
