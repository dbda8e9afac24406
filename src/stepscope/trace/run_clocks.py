"""One clock for the collectives of the whole run, by the clock rounds that capture made in it.

Ranks of one host share a clock. In a large job one rank per host takes part in the rounds, and what
it found holds for the others of its host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.records.job import ClockSet, HostClock
from stepscope.trace.clock_offsets import compare_rounds, offset_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.job import Clock, RankPart
    from stepscope.records.run_calls import RunCalls
    from stepscope.trace.clock_offsets import ClockOffsets, Flags

_USUAL = 0.95  # of the calls have a smaller error than the rank's
_READING_NS = 1_000


class AlignedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Every rank's calls on the clock of the first; `apart` are ranks that no meeting connects."""

    runs: dict[int, RunCalls]
    error_ns: dict[int, float]
    apart: tuple[int, ...] = ()


def share_rounds(parts: Sequence[RankPart]) -> list[RankPart]:
    """Give ranks without rounds those of the rank that met for their host."""
    met = {part.host: part for part in reversed(parts) if part.host and part.rounds}
    return [
        replace(part, rounds=met[part.host].rounds, keeping=part.keeping or met[part.host].keeping)
        if not part.rounds and part.host in met
        else part
        for part in parts
    ]


def align_runs(parts: Sequence[RankPart]) -> AlignedRuns:
    """Only ranks that kept their collectives."""
    logged = [part for part in share_rounds(parts) if part.run is not None]
    runs: dict[int, RunCalls] = {}
    errors: dict[int, float] = {}
    apart = []
    for part in logged:
        assert part.run is not None
        if share_clock(part, logged[0]):
            runs[part.rank], errors[part.rank] = part.run, 0.0
            continue
        offsets = _compare(part, logged[0])
        if offsets is None:
            apart.append(part.rank)
            continue
        runs[part.rank], errors[part.rank] = _shift(part.run, offsets)
    return AlignedRuns(runs=runs, error_ns=errors, apart=tuple(apart))


def share_clock(one: RankPart, other: RankPart) -> bool:
    """Hosts may have one name and different clocks; their rounds show that."""
    if one is other:
        return True
    if one.host != other.host:
        return False
    if not one.rounds or one.rounds is other.rounds:
        return True
    offsets = _compare(one, other)
    if offsets is None:
        return True
    return bool((np.abs(offsets.offset_ns) <= offsets.error_ns + _READING_NS).all())


def _compare(part: RankPart, reference: RankPart) -> ClockOffsets | None:
    unkept = [one.keeping and one.keeping.synchronised is False for one in (part, reference)]
    return compare_rounds(part.rounds, reference.rounds, kept=not any(unkept))


def _shift(run: RunCalls, offsets: ClockOffsets) -> tuple[RunCalls, float]:
    """Without the calls between two meetings where a clock was set."""
    offset, error, known = offset_at(offsets, run.arrival_ns, run.number)
    shifted = run.arrival_ns - offset
    usual = float(np.quantile(error[known], _USUAL)) if known.any() else 0.0
    if known.all():
        return replace(run, arrival_ns=shifted), usual
    kept = {name: getattr(run, name)[known] for name in ("group", "sequence", "number")}
    return replace(run, arrival_ns=shifted[known], **kept), usual


def describe_hosts(parts: Sequence[RankPart], clock: Clock) -> tuple[HostClock, ...]:
    """Every host's clock against that of the reference rank. Empty where hosts are not known."""
    shared = share_rounds(parts)
    by_host: dict[str, list[RankPart]] = {}
    for part in shared:
        if part.host:
            by_host.setdefault(part.host, []).append(part)
    reference = next((part for part in shared if part.rank == clock.reference), None)
    reference = reference or (shared[0] if shared else None)
    if reference is None or not reference.host:
        return ()
    others = [part for part in shared if part.host != reference.host]
    return tuple(
        _reference_host(ranks, reference, others)
        if host == reference.host
        else _other_host(ranks, reference, clock)
        for host, ranks in by_host.items()
    )


def _describe(parts: list[RankPart]) -> HostClock:
    """Its ranks and who keeps its clock."""
    keeping = next((part.keeping for part in parts if part.keeping), None)
    facts = msgspec.structs.asdict(keeping) if keeping else {}
    ranks = tuple(part.rank for part in parts)
    return HostClock(**{**facts, "host": parts[0].host or "", "ranks": ranks})


def _reference_host(
    parts: list[RankPart], reference: RankPart, others: list[RankPart]
) -> HostClock:
    """Another host's meetings show where its own clock was not the one that was set."""
    other = next((part for part in others if part.rounds), None)
    offsets = _compare(other, reference) if other else None
    return replace(
        _describe(parts),
        offset_ns=0,
        error_ns=0,
        drift_ppm=0.0,
        meetings=len(reference.rounds),
        was_set=_list_sets(offsets, offsets.was_set & ~offsets.is_own, -1) if offsets else (),
    )


def _other_host(parts: list[RankPart], reference: RankPart, clock: Clock) -> HostClock:
    first = next((part for part in parts if part.rounds), parts[0])
    record = _describe(parts)
    offsets = _compare(first, reference)
    if offsets is None:
        known = first.rank in clock.offset_ns
        return replace(
            record,
            offset_ns=clock.offset_ns[first.rank] if known else None,
            error_ns=clock.error_ns[first.rank] if known else None,
        )
    near = int(np.abs(offsets.at_ns - (clock.at_ns or offsets.at_ns[0])).argmin())
    drift = offsets.mean_drift
    return replace(
        record,
        offset_ns=int(offsets.offset_ns[near]),
        error_ns=int(np.ceil(offsets.error_ns[near])),
        drift_ppm=None if drift is None else drift * 1e6,
        meetings=len(offsets),
        was_set=_list_sets(offsets, offsets.was_set & offsets.is_own, 1),
    )


def _list_sets(offsets: ClockOffsets, stretches: Flags, sign: int) -> tuple[ClockSet, ...]:
    return tuple(
        ClockSet(
            after_step=_step(offsets, stretch),
            before_step=_step(offsets, stretch + 1),
            by_ns=sign * int(offsets.offset_ns[stretch + 1] - offsets.offset_ns[stretch]),
        )
        for stretch in np.flatnonzero(stretches).tolist()
    )


def _step(offsets: ClockOffsets, meeting: int) -> int | None:
    step = int(offsets.step[meeting])
    return step if step >= 0 else None
