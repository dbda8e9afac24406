"""What could not be read from a file, in words and counts: nothing is lost silently."""

from __future__ import annotations

import msgspec


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to know about the input. `id` is stable; `detail` is a sentence for people."""

    id: str
    detail: str
    count: int | None = None
    byte_offset: int | None = None
