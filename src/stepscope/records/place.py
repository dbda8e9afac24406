"""A line of code."""

from __future__ import annotations

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    line: int
    function: str = ""
