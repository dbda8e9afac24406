"""A Python source file and edits of it: keywords added to calls, statements wrapped or inserted.

All edits are made on the file as it is, by place, so that the user's own layout and comments stay.
Places are offsets in bytes, as `ast` counts columns.
"""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

INDENT = "    "


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the bytes from `start` to `end` of a file; an insertion has both the same.

    A header such as `with ...:` also moves the lines that begin at `moves` one level to the right;
    what it covers ends at `until`.
    """

    file: str
    start: int
    end: int
    text: bytes
    moves: tuple[int, ...] = ()
    until: int = 0

    @property
    def level(self) -> bytes:
        """One level of indentation, as the file has it."""
        return b"\t" if self.text.startswith(b"\t") else INDENT.encode()


@dataclass(frozen=True)
class PythonSource:
    """One parsed file."""

    file: str
    text: bytes
    tree: ast.Module

    @classmethod
    def parse(cls, file: str, text: bytes) -> PythonSource | None:
        """None if it is not Python that this version can read."""
        try:
            return cls(file, text, ast.parse(text))
        except (SyntaxError, ValueError):
            return None

    # Finding places.

    def call_at(self, line: int, name: str) -> ast.Call | None:
        """The call of `name` (such as AdamW, under whatever alias) on this line; if it was called
        through a variable, the only call there."""
        calls = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or line)
        ]
        named = [call for call in calls if self.called(call) == name]
        if named:
            return max(named, key=lambda call: (call.lineno, call.col_offset))
        starting = [call for call in calls if call.lineno == line]
        return starting[0] if len(starting) == 1 else None

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
        """Whether `import module` stands in the file, under its own name."""
        return any(
            isinstance(node, ast.Import)
            and any(alias.name == module and not alias.asname for alias in node.names)
            for node in self.tree.body
        )

    def statement_at(self, line: int) -> ast.stmt | None:
        """The innermost statement that holds this line."""
        holding = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)
        ]
        return max(holding, key=lambda node: node.lineno, default=None)

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that it stands in."""
        for node in ast.walk(self.tree):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list) and statement in block:
                    return block
        return []

    def parents_of(self, statement: ast.stmt) -> list[ast.AST]:
        """The nodes around a statement, innermost first."""
        return [
            node
            for node in reversed(list(ast.walk(self.tree)))
            if node is not statement and any(child is statement for child in ast.walk(node))
        ]

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
        for keyword in call.keywords:
            if keyword.arg == name:
                return self._replace(keyword.value, value)
        if position is not None:
            if any(isinstance(argument, ast.Starred) for argument in call.args):
                return None
            if position < len(call.args):
                return self._replace(call.args[position], value)
        if any(keyword.arg is None for keyword in call.keywords):
            return None
        return self._add_argument(call, f"{name}={value}")

    def _add_argument(self, call: ast.Call, text: str) -> Edit:
        given = [*call.args, *call.keywords]
        if not given:
            end = self._span(call)[1] - 1
            return Edit(self.file, end, end, text.encode())
        end = max(self._span(node)[1] for node in given)
        return Edit(self.file, end, end, f", {text}".encode())

    def insert_before(self, statement: ast.stmt, *lines: str) -> Edit:
        """New statements before this one, indented as it is."""
        start = self._line_start(statement.lineno)
        return Edit(self.file, start, start, _joined(lines, self._indent(statement)))

    def insert_after(self, statement: ast.stmt, *lines: str) -> Edit:
        end = self._line_start((statement.end_lineno or statement.lineno) + 1)
        text = _joined(lines, self._indent(statement))
        if end == len(self.text) and not self.text.endswith(b"\n"):
            text = b"\n" + text
        return Edit(self.file, end, end, text)

    def insert_after_imports(self, *lines: str) -> Edit:
        """After the imports at the file's top, with an empty line around."""
        imports = [node for node in self._head() if isinstance(node, ast.Import | ast.ImportFrom)]
        if imports:
            return self.insert_after(imports[-1], "", *lines)
        first = next(iter(self.tree.body), None)
        if first is None:
            return Edit(self.file, 0, 0, _joined(lines, ""))
        return self.insert_before(first, *lines, "")

    def ensure_import(self, module: str) -> tuple[Edit, ...]:
        """`import module`, after the imports at the top, unless it is there."""
        return () if self.imports(module) else self._add_import(f"import {module}")

    def _add_import(self, line: str) -> tuple[Edit, ...]:
        imports = [n for n in self._head() if isinstance(n, ast.Import | ast.ImportFrom)]
        if imports:
            return (self.insert_after(imports[-1], line),)
        return (self.insert_after_imports(line),)

    def ensure_from_import(self, module: str, *names: str) -> tuple[Edit, ...]:
        """`from module import names`, after the imports at the top, unless they are there."""
        there = {
            alias.name
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom) and node.module == module
            for alias in node.names
            if not alias.asname
        }
        missing = ", ".join(name for name in names if name not in there)
        return self._add_import(f"from {module} import {missing}") if missing else ()

    def wrap(self, first: ast.stmt, last: ast.stmt, header: str) -> tuple[Edit, ...]:
        """Put statements of one block, from first to last, under a header such as `with ...:`."""
        start, end = first.lineno, last.end_lineno or last.lineno
        moves = tuple(
            self._line_start(line)
            for line in range(start, end + 1)
            if line not in self._inside_strings and self._lines[line - 1].strip()
        )
        text = f"{self._indent(first)}{header}\n".encode()
        head, until = self._line_start(start), self._line_start(end + 1)
        return (Edit(self.file, head, head, text, moves, until),)

    def has_lines_of_its_own(self, first: ast.stmt, last: ast.stmt) -> bool:
        """Whether no other statement stands on the lines from first to last."""
        end = self._line_start(last.end_lineno or last.lineno) + (last.end_col_offset or 0)
        after = self.text[end : self._line_start((last.end_lineno or last.lineno) + 1)].strip()
        before = self._lines[first.lineno - 1][: first.col_offset]
        return not before.strip() and (not after or after.startswith(b"#"))

    def _indent(self, statement: ast.stmt) -> str:
        """What stands before the statement on its line, as far as it is blank."""
        before = self._lines[statement.lineno - 1][: statement.col_offset].decode()
        return before if not before.strip() else before[: len(before) - len(before.lstrip())]

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
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.For | ast.While):
                return
            yield node

    def _replace(self, node: ast.AST, text: str) -> Edit:
        return Edit(self.file, *self._span(node), text.encode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
        start = self._line_start(node.lineno) + node.col_offset
        end = self._line_start(node.end_lineno or node.lineno) + (node.end_col_offset or 0)
        return start, end

    @cached_property
    def _lines(self) -> list[bytes]:
        return self.text.splitlines(keepends=True)

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self._lines:
            starts.append(starts[-1] + len(line))
        return starts

    def _line_start(self, line: int) -> int:
        return self._starts[min(line - 1, len(self._lines))]

    @cached_property
    def _inside_strings(self) -> set[int]:
        """Lines that begin inside a string: indenting them would change it."""
        inside: set[int] = set()
        try:
            for token in tokenize.tokenize(io.BytesIO(self.text).readline):
                if token.type == tokenize.STRING and token.end[0] > token.start[0]:
                    inside |= set(range(token.start[0] + 1, token.end[0] + 1))
        except (tokenize.TokenError, SyntaxError, IndentationError):
            return inside
        return inside


def _joined(lines: tuple[str, ...], indent: str) -> bytes:
    return "".join(f"{indent}{line}\n" if line else "\n" for line in lines).encode()
