"""Two rules of English for every sentence: plurals, and a capital for its first word.

Names of code keep their spelling: `aten::mm` never becomes `Aten::mm`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_FIRST_WORD = re.compile(r"([a-z]+)(?:'s)?(?=[ ,;]|: |\. )")
# Lower case wherever they stand, also at the beginning of a sentence.
NAMES = frozenset(
    {"aten", "cublas", "cudnn", "gloo", "mpi", "nccl", "rccl", "stepscope", "torch", "torchrun"}
    | {"void"}  # how a kernel's name may begin
)


def counted(number: float, one: str, many: str | None = None) -> str:
    """1 step, 2 steps, 1,024 ranks; `many` is the plural where it is not `one` with an s."""
    words = plural(number, one, many)
    return f"{number:g} {words}" if isinstance(number, float) else f"{number:,} {words}"


def ordinal(number: int) -> str:
    """2nd, 4th, 11th, 101st."""
    last = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{'th' if number % 100 in (11, 12, 13) else last}"


def plural(number: float, one: str, many: str | None = None) -> str:
    """The noun alone, where its number stands elsewhere: 1 of 3 kernels."""
    return one if number == 1 else many or f"{one}s"


def sentence(text: str) -> str:
    """A capital for a first word that is plain English; names of code keep their spelling."""
    first = _FIRST_WORD.match(text)
    if first is None or first[1] in NAMES:
        return text
    return text[0].upper() + text[1:]


def number_ranges(numbers: Sequence[int], most: int = 6) -> str:
    """8-11, 14: runs of consecutive numbers, in order."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(words[:most]) + (", …" if len(words) > most else "")


def named_ranks(ranks: Sequence[int]) -> str:
    """rank 3, or ranks 8-15."""
    return f"{plural(len(ranks), 'rank')} {number_ranges(ranks)}"
