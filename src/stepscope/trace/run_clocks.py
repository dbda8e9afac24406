"""One clock for the collectives of the whole run, by the clock rounds that capture made in it.

Ranks of one host share a clock. For others the offset is known at each meeting, within half of the
shortest round trip, and is taken to change evenly in between. Before the first and after the last
meeting it may have drifted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepscope.records.job import RankPart, Rounds
    from stepscope.records.run_calls import RunCalls

    Floats = NDArray[np.float64]

_DRIFT = 20e-6  # of a clock that is kept by the network, where nothing is known


class AlignedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Every rank's calls on the clock of the first; `apart` are ranks that no meeting connects."""

    runs: dict[int, RunCalls]
    error_ns: dict[int, float]
    apart: tuple[int, ...] = ()


class _Offsets(msgspec.Struct, frozen=True, kw_only=True):
    """Of one clock against another, at each meeting."""

    at_ns: Floats
    offset_ns: Floats
    error_ns: Floats


def align_runs(parts: Sequence[RankPart]) -> AlignedRuns:
    """Only ranks that kept their collectives."""
    logged = [part for part in parts if part.run is not None]
    runs: dict[int, RunCalls] = {}
    errors: dict[int, float] = {}
    apart = []
    for part in logged:
        assert part.run is not None
        if part is logged[0] or part.host == logged[0].host:
            runs[part.rank], errors[part.rank] = part.run, 0.0
            continue
        offsets = _offsets(part.rounds, logged[0].rounds)
        if offsets is None:
            apart.append(part.rank)
            continue
        runs[part.rank], errors[part.rank] = _shift(part.run, offsets)
    return AlignedRuns(runs=runs, error_ns=errors, apart=tuple(apart))


def _offsets(mine: Sequence[Rounds], theirs: Sequence[Rounds]) -> _Offsets | None:
    known = {(rounds.label, rounds.step): rounds for rounds in theirs}
    points = []
    for rounds in mine:
        other = known.get((rounds.label, rounds.step))
        if other is None or len(other.came_ns) != len(rounds.came_ns):
            continue
        # No rank leaves a round before all have come.
        low = float((rounds.came_ns - other.left_ns).max())
        high = float((rounds.left_ns - other.came_ns).min())
        if low <= high:  # else a clock was set in between
            points.append((float(rounds.came_ns[0]), (low + high) / 2, (high - low) / 2))
    if not points:
        return None
    at, offset, error = np.array(sorted(points)).T
    return _Offsets(at_ns=at, offset_ns=offset, error_ns=error)


def _shift(run: RunCalls, offsets: _Offsets) -> tuple[RunCalls, float]:
    at = run.arrival_ns.astype(float)
    offset = np.interp(at, offsets.at_ns, offsets.offset_ns)
    outside = np.maximum(offsets.at_ns[0] - at, 0.0) + np.maximum(at - offsets.at_ns[-1], 0.0)
    error = np.interp(at, offsets.at_ns, offsets.error_ns) + _DRIFT * outside
    shifted = run.arrival_ns - np.rint(offset).astype(np.int64)
    return replace(run, arrival_ns=shifted), float(np.median(error)) if len(error) else 0.0
