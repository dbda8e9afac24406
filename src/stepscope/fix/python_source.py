"""A Python source file and edits of it: find calls and statements by line, add keywords,
wrap or insert statements. Lines and tokens by byte offset come last.
"""

from __future__ import annotations

import ast
import codecs
import io
import re
import tokenize
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# All edits are made on the file as it is, by place, so that the user's own layout and comments
# stay. Places are offsets in bytes, as `ast` counts columns. Where a statement shares its line with
# another (`a; b`, `for x in y: step()`) nothing is inserted or wrapped: NoPlaceError says so.

INDENT = "    "
_LONE_RETURN = re.compile(rb"\r(?!\n)")


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the bytes from `start` to `end` of a file; an insertion has both the same.

    A header such as `with ...:` is inserted before the lines up to `wraps_to`, which are indented.
    """

    file: str
    start: int
    end: int
    text: bytes
    wraps_to: int = 0


@dataclass(frozen=True)
class PythonSource:
    """One parsed file."""

    file: str
    text: bytes
    tree: ast.Module

    @classmethod
    def parse(cls, file: str, text: bytes) -> PythonSource | None:
        """None if it is not Python in UTF-8 that this version can read."""
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(text).readline)
            if encoding not in ("utf-8", "utf-8-sig") or _LONE_RETURN.search(text):
                return None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they are about the user's own source
                return cls(file, text, ast.parse(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    # Finding places.

    def call_at(self, line: int, name: str, ends: tuple[int, int] | None = None) -> ast.Call | None:
        """The call that ran on this line: the one that ends at `ends` (line and column) where that
        is known; else the only call of `name` (such as AdamW, under whatever alias); else, if it
        was called through a variable, the only call there."""
        calls = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or line)
        ]
        if ends is not None:
            return next((c for c in calls if (c.end_lineno, c.end_col_offset) == ends), None)
        named = [call for call in calls if self.called(call) == name]
        starting = [call for call in named or calls if call.lineno == line]
        wanted = starting or named
        return wanted[0] if len(wanted) == 1 else None

    def called(self, call: ast.Call) -> str:
        """The last part of the called name, aliases resolved."""
        function = call.func
        if isinstance(function, ast.Attribute):
            return function.attr
        if isinstance(function, ast.Name):
            return self._aliases.get(function.id, function.id)
        return ""

    @cached_property
    def _aliases(self) -> dict[str, str]:
        return {
            alias.asname: alias.name.rpartition(".")[2]
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom | ast.Import)
            for alias in node.names
            if alias.asname
        }

    def imports(self, module: str) -> bool:
        """Whether the top level imports it under its own name; `import a.b` binds `a` too."""
        return any(
            not alias.asname and f"{alias.name}.".startswith(f"{module}.")
            for node in self.tree.body
            if isinstance(node, ast.Import)
            for alias in node.names
        )

    def statement_at(self, line: int, ends: tuple[int, int] | None = None) -> ast.stmt | None:
        """The innermost statement that holds this line; of several on one line, the one with the
        code that ends at `ends` (line and column) where that is known, else the last."""
        holding = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and first_line(node) <= line <= (node.end_lineno or line)
        ]
        running = [
            node
            for node in holding
            if ends is not None
            and (node.lineno, node.col_offset)
            < ends
            <= (node.end_lineno or line, node.end_col_offset or 0)
        ]
        return max(
            running or holding, key=lambda node: (node.lineno, node.col_offset), default=None
        )

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that it stands in."""
        for node in ast.walk(self.tree):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list) and statement in block:
                    return block
        return []

    def parents_of(self, statement: ast.AST) -> list[ast.AST]:
        """The nodes around a node, innermost first."""
        return [
            node
            for node in reversed(list(ast.walk(self.tree)))
            if node is not statement and any(child is statement for child in ast.walk(node))
        ]

    def loops_around(self, statement: ast.stmt) -> list[ast.For | ast.While]:
        """The loops that run a statement, innermost first, inside its own function."""
        loops: list[ast.For | ast.While] = []
        for node in self.parents_of(statement):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                break
            if isinstance(node, ast.For | ast.While):
                loops.append(node)
        return loops

    def segment(self, node: ast.AST) -> str:
        """Its text as it stands."""
        start, end = self._span(node)
        return self.text[start:end].decode()

    # Editing.

    def set_keyword(
        self, call: ast.Call, name: str, value: str, position: int | None = None
    ) -> Edit | None:
        """Give an argument of a call this value. `position` is where it stands if it was given
        without its name. None where a starred argument hides whether it was given."""
        positions = {} if position is None else {name: position}
        edits = self.set_keywords(call, {name: value}, positions)
        return None if edits is None else edits[0]

    def set_keywords(
        self, call: ast.Call, values: Mapping[str, str], positions: Mapping[str, int]
    ) -> tuple[Edit, ...] | None:
        """Several arguments of one call, as set_keyword does it; all of them or none."""
        if call in self._calls_in_strings:
            return None
        edits: list[Edit] = []
        new: list[str] = []
        for name, value in values.items():
            given = self._given(call, name, positions.get(name))
            if given is not None:
                edits.append(self.replace(given, value))
            elif self._may_be_given(call, name in positions):
                return None
            else:
                new.append(f"{name}={value}")
        return (*edits, *([self._add_arguments(call, new)] if new else []))

    @cached_property
    def _calls_in_strings(self) -> set[ast.AST]:
        """Python before 3.12 has wrong places for what stands in f"{...}"."""
        strings = [node for node in ast.walk(self.tree) if isinstance(node, ast.JoinedStr)]
        return {node for string in strings for node in ast.walk(string)}

    def _given(self, call: ast.Call, name: str, position: int | None) -> ast.expr | None:
        """The argument's value, where it stands in the call."""
        for keyword in call.keywords:
            if keyword.arg == name:
                return keyword.value
        before = call.args[:position]
        if position is None or any(isinstance(argument, ast.Starred) for argument in before):
            return None
        return call.args[position] if position < len(call.args) else None

    def _may_be_given(self, call: ast.Call, has_position: bool) -> bool:
        """By a starred argument; and f(x for x in y) takes no other without more parentheses."""
        starred = any(isinstance(argument, ast.Starred) for argument in call.args)
        return (
            (has_position and starred)
            or any(keyword.arg is None for keyword in call.keywords)
            or any(self._span(argument)[1] == self._span(call)[1] for argument in call.args)
        )

    def _add_arguments(self, call: ast.Call, new: list[str]) -> Edit:
        """After the last argument, and on lines of their own if that one has such a line."""
        start, end = self._span(call)
        if not (call.args or call.keywords):
            return self._insert(end - 1, ", ".join(new))
        tokens = self._lines.tokens_between(start, end - 1)
        has_comma = tokens[-1].text == ","
        last = max([*call.args, *call.keywords], key=lambda node: self._span(node)[1])
        indent = self._lines.indent_before(self._span(last)[0])
        rest = self._lines.rest_of_line(tokens[-1].end)
        if indent is None or rest is None or (rest.strip() and not has_comma):
            place = tokens[-2 if has_comma else -1].end
            return self._insert(place, "".join(f", {text}" for text in new))
        lines = [f"{self._lines.end_of_line}{indent}{text}" for text in new]
        if has_comma:
            text = "".join(f"{line}," for line in lines)
            return self._insert(tokens[-1].end + len(rest), text)
        return self._insert(tokens[-1].end, "".join(f",{line}" for line in lines))

    def insert_before(self, statement: ast.stmt, *lines: str) -> Edit:
        """New statements before this one, indented as it is."""
        indent = self._own_indent(statement)
        start = self._lines.start_of(first_line(statement))
        return self._insert(start, self._lines.joined(lines, indent))

    def insert_after(self, statement: ast.stmt, *lines: str) -> Edit:
        """New statements after this one, which may follow others on its line."""
        indent = self._own_indent(self._first_on_its_line(statement))
        self._require_line_end(statement)
        end = self._lines.start_of((statement.end_lineno or statement.lineno) + 1)
        text = self._lines.joined(lines, indent)
        if end == len(self.text) and not self.text.endswith(b"\n"):
            text = self._lines.end_of_line + text.removesuffix(self._lines.end_of_line)
        return self._insert(end, text)

    def insert_after_imports(self, *lines: str) -> Edit:
        """After the imports at the file's top, with an empty line around."""
        imported = self._last_import()
        if imported is not None:
            return self.insert_after(imported, "", *lines)
        return self._insert_at_top(*lines)

    def ensure_import(self, module: str) -> tuple[Edit, ...]:
        """`import module`, after the imports at the top, unless it is there."""
        return () if self.imports(module) else (self._add_import(f"import {module}"),)

    def ensure_from_import(self, module: str, *names: str) -> tuple[Edit, ...]:
        """`from module import names`, after the imports at the top, without those there."""
        there = {
            alias.name
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom) and node.module == module
            for alias in node.names
            if not alias.asname
        }
        missing = ", ".join(name for name in names if name not in there)
        return (self._add_import(f"from {module} import {missing}"),) if missing else ()

    def _add_import(self, line: str) -> Edit:
        imported = self._last_import()
        if imported is not None:
            return self.insert_after(imported, line)
        return self._insert_at_top(line)

    def wrap(self, first: ast.stmt, last: ast.stmt, header: str) -> tuple[Edit, ...]:
        """Put statements of one block, from first to last, under a header such as `with ...:`."""
        indent = self._own_indent(first)
        self._require_line_end(last)
        start = self._lines.start_of(first_line(first))
        end = self._lines.start_of((last.end_lineno or last.lineno) + 1)
        text = self._lines.joined([header], indent).encode()
        return (Edit(self.file, start, start, text, end),)

    def surround(self, node: ast.expr, before: str, after: str) -> tuple[Edit, Edit]:
        """Put text around an expression."""
        start, end = self._span(node)
        return self._insert(start, before), self._insert(end, after)

    def replace(self, node: ast.AST, text: str) -> Edit:
        return Edit(self.file, *self._span(node), text.encode())

    def _insert(self, place: int, text: str) -> Edit:
        return Edit(self.file, place, place, text.encode())

    def _insert_at_top(self, *lines: str) -> Edit:
        """Before the first statement; a docstring and imports of __future__ stay before it."""
        body = list(self.tree.body)
        kept: ast.stmt | None = None
        if ast.get_docstring(self.tree) is not None:
            kept = body.pop(0)
        while body and isinstance(body[0], ast.ImportFrom) and body[0].module == "__future__":
            kept = body.pop(0)
        if body:
            return self.insert_before(body[0], *lines, "")
        if kept is not None:
            return self.insert_after(kept, "", *lines)
        return self._insert(len(self.text), self._lines.joined(lines, ""))

    def _last_import(self) -> ast.stmt | None:
        """The last one at the top that new lines can follow."""
        imports = [n for n in self._head() if isinstance(n, ast.Import | ast.ImportFrom)]
        return next((n for n in reversed(imports) if self.has_lines_of_its_own(n, n)), None)

    def _head(self) -> Iterator[ast.stmt]:
        """Statements at the top: a docstring, imports, and what stands between imports."""
        last = max(
            (
                number
                for number, node in enumerate(self.tree.body)
                if isinstance(node, ast.Import | ast.ImportFrom)
            ),
            default=-1,
        )
        for node in self.tree.body[: last + 1]:
            if isinstance(
                node,
                ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.For | ast.While,
            ):
                return
            yield node

    # Lines.

    @cached_property
    def _lines(self) -> SourceLines:
        return SourceLines(self.text)

    def starts_line(self, statement: ast.stmt) -> bool:
        """Whether nothing stands before it on its line."""
        return len(self._lines.indent(first_line(statement))) == statement.col_offset

    def has_lines_of_its_own(self, first: ast.stmt, last: ast.stmt) -> bool:
        """Whether no other statement stands on the lines from first to last."""
        try:
            self._own_indent(first)
            self._require_line_end(last)
        except NoPlaceError:
            return False
        return True

    def indentable(self, header: Edit) -> tuple[list[int], bytes]:
        """Where the lines under a header are to be indented (not those inside strings), and with
        what: one level, as this file has it."""
        lines = self._lines
        start, end = lines.line_of(header.start), lines.line_of(header.wraps_to - 1)
        indent = lines.indent(start)
        places = [
            lines.start_of(number) + len(indent)
            for number in range(start, end + 1)
            if number not in lines.inside_strings
            and lines.line(number).strip()
            and lines.line(number).startswith(indent.encode())
        ]
        return places, self._indent_unit(indent).encode()

    def _own_indent(self, statement: ast.stmt) -> str:
        """What stands before it on its first line, if that is white space alone."""
        number = first_line(statement)
        indent = self._lines.indent(number)
        code = self._lines.line(number)[len(indent) :]
        shares_line = len(indent) != statement.col_offset or code.startswith(b"elif")
        if shares_line or self._lines.continues_line_before(number):
            raise NoPlaceError(f"{self.file}:{number}: the statement has no line of its own")
        return indent

    def _first_on_its_line(self, statement: ast.stmt) -> ast.stmt:
        """Of the statements with semicolons between them that end with this one."""
        block = self.block_of(statement)
        place = block.index(statement) if statement in block else 0
        while place and block[place - 1].end_lineno == statement.lineno:
            place -= 1
            statement = block[place]
        return statement

    def _require_line_end(self, statement: ast.stmt) -> None:
        end = self._span(statement)[1]
        if self._lines.rest_of_line(end) is None:
            line = statement.end_lineno
            raise NoPlaceError(f"{self.file}:{line}: another statement follows on this line")

    def _indent_unit(self, outer: str) -> str:
        """By how much this file indents a block that stands at `outer`."""
        for node in ast.walk(self.tree):
            body = getattr(node, "body", None)
            if not isinstance(node, ast.stmt) or not isinstance(body, list):
                continue
            around = self._lines.indent(first_line(node))
            inside = self._lines.indent(first_line(body[0]))
            unit = inside.removeprefix(around)
            if inside != around and inside.startswith(around) and _looks_like(unit, outer):
                return unit
        return "\t" if outer.endswith("\t") else INDENT

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
        start = self._lines.start_of(node.lineno) + node.col_offset
        end = self._lines.start_of(node.end_lineno or node.lineno) + (node.end_col_offset or 0)
        return start, end


def first_line(statement: ast.stmt) -> int:
    """The line that it begins on, decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(node.lineno for node in decorators)])


def _looks_like(unit: str, outer: str) -> bool:
    """Tabs inside tabs, spaces inside spaces."""
    return not outer or ("\t" in unit) == ("\t" in outer)


# The lines and tokens of a Python source file, by offset in bytes.

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
