"""A file as the editor has it now."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lsprotocol import types

from stepscope.ui.lsp.rebased_change import text_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True)
class OpenFile:
    """`units` counts a text's length as the editor does."""

    path: Path
    uri: str
    text: str
    version: int | None
    units: Callable[[str], int]

    @cached_property
    def lines(self) -> list[str]:
        return text_lines(self.text)

    def width(self, line: int) -> int:
        """Of a line (from 0), without its end."""
        return self.units(self._line(line)) if 0 <= line < len(self.lines) else 0

    def line_range(self, line: int) -> types.Range:
        """From a line's first word to its end."""
        text = self._line(line) if 0 <= line < len(self.lines) else ""
        indent = len(text) - len(text.lstrip())
        start = types.Position(line, self.units(text[:indent]))
        return types.Range(start, types.Position(line, self.units(text)))

    def _line(self, line: int) -> str:
        return self.lines[line].rstrip("\n")
