"""A line of code."""

from __future__ import annotations

from pathlib import PurePath

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    line: int
    function: str = ""

    @property
    def short(self) -> str:
        """`train.py:12`"""
        return f"{PurePath(self.file).name}:{self.line}"

    @property
    def words(self) -> str:
        """`train (train.py:12)`; the line alone for a script's own level."""
        if self.function in ("", "<module>"):
            return self.short
        return f"{self.function} ({self.short})"
