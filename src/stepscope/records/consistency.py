"""The four consistency models: how far apart workers may be when one of them reads.

Standard library only: the training process imports this file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.records.together import Mode

_SPELLING = re.compile(r"(strong|bounded|eventual|weak)(?::(\d{1,9})|\((\d{1,9})\))?", re.ASCII)
_DEFAULT_WINDOW = 8  # clocks that a weak reader may keep its copy


@dataclass(frozen=True, slots=True)
class Consistency:
    """`bound` is in clocks: the largest read gap if bounded, the oldest copy if weak."""

    mode: Mode
    bound: int | None = None

    @classmethod
    def parse(cls, text: str) -> Consistency:
        """From "strong", "bounded:3", "eventual", "weak" or "weak:8"."""
        spelled = _SPELLING.fullmatch(text.strip())
        if spelled is None:
            raise _unknown(text)
        mode, number = spelled[1], spelled[2] or spelled[3]
        if mode == "bounded" and number is not None:
            return cls("bounded", int(number))
        if mode == "weak":
            return cls("weak", _DEFAULT_WINDOW if number is None else int(number))
        if mode == "strong" and number is None:
            return cls("strong", 0)
        if mode == "eventual" and number is None:
            return cls("eventual", None)
        raise _unknown(text)

    @property
    def synchronous(self) -> bool:
        """All workers' gradients of a clock become one update."""
        return self.mode in ("strong", "bounded") and self.bound == 0

    @property
    def largest_gap(self) -> int | None:
        """A read at clock c has all updates before clock c - largest_gap; None: not promised."""
        return self.bound if self.mode in ("strong", "bounded") else None

    @property
    def copy_clocks(self) -> int:
        """For how many clocks a worker goes on with parameters that it has read once."""
        return max(1, self.bound or 1) if self.mode == "weak" else 1

    def __str__(self) -> str:
        return f"{self.mode}:{self.bound}" if self.mode in ("bounded", "weak") else self.mode


def _unknown(text: str) -> UsageError:
    return UsageError(
        f'consistency "{text}" is not known: use "strong", "bounded:3" (a read misses at most 3 '
        'clocks), "eventual", or "weak:8" (a copy is used for up to 8 clocks)'
    )
