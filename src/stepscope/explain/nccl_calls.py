"""A trace's calls and those of NCCL's log: which is which, and so each call's algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepscope.records.job import KINDS
from stepscope.records.nccl import NcclJoin
from stepscope.records.trace import ABSENT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.job import CollectiveCalls
    from stepscope.records.nccl import NcclLog, NcclOps

    Int64 = NDArray[np.int64]

_SAMPLES = 32
_MOST_PLACES = 2048
_FEW, _FEW_BYTES = -2, 64
_BARRIER, _ALL_REDUCE = KINDS.index("barrier"), KINDS.index("all_reduce")


def join_ops(log: NcclLog, calls: CollectiveCalls, *, process: int | None = None) -> NcclJoin:
    """For each of a rank's calls in its trace the log's call, group by group and in order.

    A trace covers a window of what the log covers: the window is laid where most calls agree in
    kind and bytes. Calls that were captured in a CUDA graph are logged once and traced at every
    replay; those replays find nothing here. `process` picks one of a log of several.
    """
    out = np.full(len(calls), ABSENT, dtype=np.int64)
    places: dict[str, int] = {}
    taken: dict[str, int] = {}
    for number, group in enumerate(calls.groups):
        rows = np.flatnonzero(calls.group == number)
        candidates = [c for c in _candidates(log, group.size, process) if c not in taken.values()]
        fits = [(c, _lay(log.ops, c, calls, rows)) for c in candidates]
        comm, best = max(fits, key=lambda fit: fit[1].matched, default=(ABSENT, _NOWHERE))
        if not best.matched:
            continue
        out[rows[best.agrees]] = best.ops
        places[group.name], taken[group.name] = best.places, comm
    return NcclJoin(
        op=out,
        matched=int((out >= 0).sum()),
        calls=len(calls),
        places=places,
        communicators=taken,
    )


class _Fit(NamedTuple):
    agrees: NDArray[np.bool_]
    ops: Int64  # of the calls that agree
    places: int

    @property
    def matched(self) -> int:
        return len(self.ops)


_NOWHERE = _Fit(np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int64), 0)


def _candidates(log: NcclLog, size: int | None, process: int | None) -> list[int]:
    return [
        place
        for place, comm in enumerate(log.communicators)
        if process in (None, comm.process) and (size is None or comm.nranks == size)
    ]


def _lay(ops: NcclOps, comm: int, calls: CollectiveCalls, rows: NDArray[np.intp]) -> _Fit:
    """The window of a communicator's calls that agrees with most of these."""
    there = np.flatnonzero(ops.communicator == comm)
    if not len(there) or not len(rows):
        return _NOWHERE
    kind, size = calls.kind[rows].astype(np.int64), calls.size_bytes[rows].copy()
    size[kind == _BARRIER] = _FEW  # a barrier is an all-reduce of a few bytes
    kind[kind == _BARRIER] = _ALL_REDUCE
    log_kind, log_size = ops.kind[there].astype(np.int64), ops.size_bytes[there]
    offsets = _likely_offsets(log_kind, log_size, kind, size)
    fits = [_agreement(log_kind, log_size, kind, size, offset) for offset in offsets]
    counts = np.array([int(fit.sum()) for fit in fits], dtype=np.int64)
    best = np.flatnonzero(counts == counts.max()) if len(counts) else counts
    if not len(best) or not counts.max():
        return _NOWHERE
    chosen = best[np.argmin(np.abs(offsets[best] - _hint(calls, rows)))]
    agrees = fits[chosen]
    return _Fit(agrees, there[np.flatnonzero(agrees) + offsets[chosen]], len(best))


def _hint(calls: CollectiveCalls, rows: NDArray[np.intp]) -> int:
    """Where the window begins if the group's own count is the communicator's; it breaks ties."""
    sequence = int(calls.sequence[rows[0]])
    return sequence if sequence != ABSENT else 0


def _likely_offsets(log_kind: Int64, log_size: Int64, kind: Int64, size: Int64) -> Int64:
    """Offsets that the rarest calls vote for, the most votes only."""
    log_codes, codes = log_size * len(KINDS) + log_kind, size * len(KINDS) + kind
    seen, times = np.unique(log_codes, return_counts=True)
    where = np.searchsorted(seen, codes).clip(max=len(seen) - 1)
    rarity = np.where((seen[where] == codes) & (size >= 0), times[where], np.iinfo(np.int64).max)
    sample = np.argsort(rarity, kind="stable")[:_SAMPLES]
    sample = sample[rarity[sample] < np.iinfo(np.int64).max]
    if not len(sample):  # sizes are not known: kinds vote
        log_codes, codes, sample = log_kind, kind, np.arange(min(len(kind), _SAMPLES))
    votes = np.zeros(len(log_kind) + len(kind), dtype=np.int64)
    for place in sample.tolist():
        votes[np.flatnonzero(log_codes == codes[place]) - place + len(kind)] += 1
    if not votes.max():
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(votes == votes.max())[:_MOST_PLACES] - len(kind)


def _agreement(
    log_kind: Int64, log_size: Int64, kind: Int64, size: Int64, offset: int
) -> NDArray[np.bool_]:
    agrees = np.zeros(len(kind), dtype=bool)
    low, high = max(0, -offset), min(len(kind), len(log_kind) - offset)
    if low < high:
        here, there = slice(low, high), slice(low + offset, high + offset)
        same_size = (log_size[there] == size[here]) | (size[here] == ABSENT)
        same_size |= (size[here] == _FEW) & (log_size[there] <= _FEW_BYTES)
        agrees[here] = (log_kind[there] == kind[here]) & same_size
    return agrees
