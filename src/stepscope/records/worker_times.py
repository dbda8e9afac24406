"""How long each worker takes for its own work, step by step, without waiting for others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# Every step of a run, the profiler's window, or what the workers of a parameter server recorded.
TimesSource = Literal["every step", "window", "server"]


class WorkerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """`own_ns` has one series per worker. If `side_by_side`, they are equally long and step n is
    the same step on all of them."""

    workers: tuple[int, ...]
    own_ns: tuple[Floats, ...]
    side_by_side: bool
    source: TimesSource
