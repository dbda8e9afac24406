"""The lines and tokens of a Python source file, by offset in bytes."""

from __future__ import annotations

import codecs
import io
import re
import tokenize
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_BLANK = b" \t\f"
_NOTHING_MORE = re.compile(rb"[ \t\f]*;?[ \t\f]*(#.*)?", re.DOTALL)
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
# From Python 3.12 on, strings that hold expressions are several tokens.
_STRING_BEGINS = {"FSTRING_START", "TSTRING_START"}
_STRING_ENDS = {"FSTRING_END", "TSTRING_END"}


class NoPlaceError(Exception):
    """An edit cannot be made without rewriting more of the source; the message says why."""


class Token(NamedTuple):
    """A word or sign of the source; comments and line ends are none."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class SourceLines:
    """A file's text in UTF-8. Lines count from 1; their starts leave out a byte order mark."""

    text: bytes

    @cached_property
    def lines(self) -> list[bytes]:
        return self.text.removeprefix(codecs.BOM_UTF8).splitlines(keepends=True)

    @cached_property
    def _starts(self) -> list[int]:
        starts = [len(codecs.BOM_UTF8) if self.text.startswith(codecs.BOM_UTF8) else 0]
        for line in self.lines:
            starts.append(starts[-1] + len(line))
        return starts

    @cached_property
    def end_of_line(self) -> str:
        return "\r\n" if self.lines and self.lines[0].endswith(b"\r\n") else "\n"

    def line(self, number: int) -> bytes:
        return self.lines[number - 1] if 0 < number <= len(self.lines) else b""

    def start_of(self, number: int) -> int:
        """Where a line begins; the end of the text for lines after the last."""
        return self._starts[min(number - 1, len(self.lines))]

    def line_of(self, place: int) -> int:
        return max(bisect_right(self._starts, place), 1)

    def indent(self, number: int) -> str:
        line = self.line(number)
        return line[: len(line) - len(line.lstrip(_BLANK))].decode()

    def continues_line_before(self, number: int) -> bool:
        """Whether the line before ends with a backslash."""
        return self.line(number - 1).rstrip(b"\r\n").endswith(b"\\")

    def rest_of_line(self, place: int) -> bytes | None:
        """White space and a comment up to the line's end; None if there is more."""
        rest = self.text[place : self.start_of(self.line_of(place) + 1)].rstrip(b"\r\n")
        return rest if _NOTHING_MORE.fullmatch(rest) else None

    def indent_before(self, place: int) -> str | None:
        """The white space from its line's begin up to a place; None if there is more."""
        before = self.text[self.start_of(self.line_of(place)) : place]
        return None if before.strip(_BLANK) else before.decode()

    def tokens_between(self, start: int, end: int) -> list[Token]:
        return [token for token in self._tokens if start <= token.start and token.end <= end]

    @cached_property
    def _raw_tokens(self) -> list[tokenize.TokenInfo]:
        try:
            return list(tokenize.tokenize(io.BytesIO(self.text).readline))
        except (tokenize.TokenError, SyntaxError) as error:
            raise NoPlaceError(f"the source cannot be tokenized: {error}") from None

    @cached_property
    def _tokens(self) -> list[Token]:
        return [
            Token(token.string, self._place(token.start), self._place(token.end))
            for token in self._raw_tokens
            if token.type not in _LAYOUT and token.string and token.type != tokenize.ENCODING
        ]

    def _place(self, position: tuple[int, int]) -> int:
        """Of a token: its columns count characters."""
        number, column = position
        return self.start_of(number) + len(self.line(number).decode()[:column].encode())

    @cached_property
    def inside_strings(self) -> set[int]:
        """Lines that begin inside a string: indenting them would change it."""
        inside: set[int] = set()
        begins: list[int] = []
        for token in self._raw_tokens:
            kind = tokenize.tok_name[token.type]
            if kind == "STRING":
                inside |= set(range(token.start[0] + 1, token.end[0] + 1))
            elif kind in _STRING_BEGINS:
                begins.append(token.start[0])
            elif kind in _STRING_ENDS and begins:
                inside |= set(range(begins.pop() + 1, token.end[0] + 1))
        return inside

    def joined(self, lines: Iterable[str], indent: str) -> str:
        """New lines, each ended as this file ends its lines."""
        end = self.end_of_line
        return "".join(f"{indent}{line}{end}" if line else end for line in lines)
