"""The first lines of every answer: the verdict, why it is so, what to do next."""

from __future__ import annotations

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    verdict: str
    why: str
    next: str
