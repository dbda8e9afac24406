"""What one call costs, and the table of formulas by operator."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.explain.flops.call import Call

    Formula = Callable[[Call], "Cost"]

UNKNOWN = -1


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one call. -1 is unknown."""

    flops: int = 0  # everything the device does, as torch's own counter counts
    again: int = 0  # the part that recomputes results of the forward pass
    moved: int = UNKNOWN  # bytes: every input read once, every output written once
    list_elements: int = 0  # read and written in lists of tensors, of unrecorded dtype
    list_passes: int = 0  # whole lists read or written that were too long to be recorded


# Operators that multiply matrices in some way. Of nested ones, the innermost counts.
MATMUL_LIKE: dict[str, Formula] = {}
# All others with known bytes; their FLOPs are not counted, as in every other counter.
OTHER: dict[str, Formula] = {}


def _register_in(table: dict[str, Formula], *names: str) -> Callable[[Formula], Formula]:
    def register(formula: Formula) -> Formula:
        table.update(dict.fromkeys(names, formula))
        return formula

    return register


matmul_like = partial(_register_in, MATMUL_LIKE)
memory_bound = partial(_register_in, OTHER)
