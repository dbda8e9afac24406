"""Compare clocks over the whole run, by the clock rounds that capture made: one clock
against another, and all ranks' collectives on one clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from stepscope.records.job import Clock, ClockSet, HostClock, RankPart, Rounds, RunCalls
from stepscope.records.normal import quantile

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]

# One clock against another over a whole run, from the rounds that both took part in.
#
# At a meeting the offset is known within half of its shortest round trip. Between two meetings it
# is taken to change evenly. A clock's drift is not quite constant, so the error grows with the
# distance from the nearest meeting: by `WANDER`, or by as much as the drift differs from that of
# the stretches before and after. Two meetings whose offsets no drift can explain have a clock set
# between them: what lies there is not aligned, and everything else is.

MAX_DRIFT = 200e-6  # of two quartz clocks against each other
KEPT_DRIFT = 20e-6  # of two clocks that are kept by the network
WANDER = 2e-6  # by which a clock's drift differs from its mean
_CLOCK_STEP_NS = 1_000_000  # a smaller change may be the reading


class ClockOffsets(msgspec.Struct, frozen=True, kw_only=True):
    """Meetings in order. Stretch k lies between meetings k and k + 1."""

    step: Ints  # of each meeting; -1 if unknown
    at_ns: Ints  # on the clock itself
    offset_ns: Ints  # clock minus reference
    error_ns: Floats
    elapsed_ns: Floats  # of each stretch
    was_set: Flags  # in each stretch
    is_own: Flags  # in each stretch: this clock was set, not the reference
    most_drift: float  # where a single meeting says nothing about it

    def __len__(self) -> int:
        return len(self.at_ns)

    @property
    def drift(self) -> Floats:
        """Return the drift of each stretch; NaN where a clock was set."""
        with np.errstate(invalid="ignore", divide="ignore"):
            drift = np.diff(self.offset_ns) / self.elapsed_ns
        return np.where(self.was_set, np.nan, drift)

    @property
    def mean_drift(self) -> float | None:
        """Over all stretches; None with one meeting."""
        known = ~self.was_set
        elapsed = float(self.elapsed_ns[known].sum())
        return float(np.diff(self.offset_ns)[known].sum()) / elapsed if elapsed > 0 else None


def compare_rounds(
    mine: Sequence[Rounds], theirs: Sequence[Rounds], *, kept: bool = True
) -> ClockOffsets | None:
    """Return None without a common meeting. `kept`: NTP or PTP keeps both clocks, if known."""
    known = {(rounds.label, rounds.step): rounds for rounds in theirs}
    pairs = [(rounds, known.get((rounds.label, rounds.step))) for rounds in mine]
    points = [point for one, other in pairs if other and (point := _bound(one, other))]
    if not points:
        return None
    order = _in_order([one for one, _, _, _ in points])
    ours, others, lows, highs = zip(*(points[place] for place in order), strict=True)
    at, their_at = (np.array([int(r.came_ns[0]) for r in rounds]) for rounds in (ours, others))
    error = (np.array(highs) - np.array(lows)) / 2
    offset = np.array([low + (high - low) // 2 for low, high in zip(lows, highs, strict=True)])
    elapsed = _elapsed(np.diff(at), np.diff(their_at))
    was_set = np.abs(np.diff(offset)) > MAX_DRIFT * elapsed + error[1:] + error[:-1]
    own, other = _was_stepped(ours), _was_stepped(others)
    return ClockOffsets(
        step=np.array([-1 if one.step is None else one.step for one in ours]),
        at_ns=at,
        offset_ns=offset,
        error_ns=error.astype(float),
        elapsed_ns=elapsed,
        was_set=was_set | own | other,
        is_own=own | ~other,
        most_drift=KEPT_DRIFT if kept else MAX_DRIFT,
    )


def _bound(mine: Rounds, other: Rounds) -> tuple[Rounds, Rounds, int, int] | None:
    """No rank leaves a round before all have come, which bounds the offset from both sides."""
    if len(other.came_ns) != len(mine.came_ns):
        return None
    low = int((mine.came_ns - other.left_ns).max())
    high = int((mine.left_ns - other.came_ns).min())
    return (mine, other, low, high) if low <= high else None  # else a clock was set in between


def _in_order(rounds: Sequence[Rounds]) -> list[int]:
    """Sort by step, where all have one: a clock that is set back does not tell."""
    if all(one.step is not None for one in rounds):
        return sorted(range(len(rounds)), key=lambda place: rounds[place].step or 0)
    return sorted(range(len(rounds)), key=lambda place: int(rounds[place].came_ns[0]))


def _elapsed(mine: Ints, theirs: Ints) -> Floats:
    """If one clock was set, the other still tells; a clock set back shows nothing sensible."""
    shorter, longer = np.minimum(mine, theirs), np.maximum(mine, theirs)
    return np.maximum(np.where(shorter > 0, shorter, longer), 1).astype(float)


def _was_stepped(rounds: Sequence[Rounds]) -> Flags:
    """Return where a host's wall clock did not follow its own counter. Nobody can set that, and NTP
    speeds up or slows down both alike."""
    known = [one.perf_to_unix_ns for one in rounds]
    if any(value is None for value in known):
        return np.zeros(len(rounds) - 1, np.bool_)
    moved = np.abs(np.diff(np.array(known, np.int64)))
    return np.asarray(moved > _CLOCK_STEP_NS)


def offset_at(offsets: ClockOffsets, at_ns: Ints, step: Ints) -> tuple[Ints, Floats, Flags]:
    """The offset at these times of the clock, how far off it may be, and where it is known."""
    stretch = _find_stretch(offsets, at_ns, step)
    last = len(offsets) - 1
    inside = (stretch >= 0) & (stretch < last)
    before, after = np.clip(stretch, 0, last), np.clip(stretch + 1, 0, last)
    place = np.clip(stretch, 0, max(last - 1, 0))
    since = (at_ns - offsets.at_ns[before]).astype(float)
    until = (offsets.at_ns[after] - at_ns).astype(float)
    drift, wander = (
        np.where(inside, within[place], outside[place])
        for within, outside in zip(_within(offsets), _outside(offsets), strict=True)
    )
    part = np.where(inside, since / np.maximum(since + until, 1.0), 0.0)
    nearest = np.where(inside, np.minimum(np.abs(since), np.abs(until)), np.abs(since))
    error = (1 - part) * offsets.error_ns[before] + part * offsets.error_ns[after]
    known = ~(inside & offsets.was_set[place]) if last else np.ones(len(at_ns), np.bool_)
    moved = np.rint(drift * since).astype(np.int64)
    return offsets.offset_ns[before] + moved, error + wander * nearest, known


def _find_stretch(offsets: ClockOffsets, at_ns: Ints, step: Ints) -> Ints:
    """-1 before the first meeting. A meeting at step n is held before that step begins."""
    if (offsets.step >= 0).all():
        return np.searchsorted(offsets.step, step, side="right").astype(np.int64) - 1
    return np.searchsorted(offsets.at_ns, at_ns, side="right").astype(np.int64) - 1


def _within(offsets: ClockOffsets) -> tuple[Floats, Floats]:
    """Return each stretch's drift, and by how much the drift may differ from that inside it."""
    if len(offsets) < 2:
        return np.zeros(1), np.zeros(1)
    drift, uncertain = offsets.drift, _uncertain(offsets)
    wander = np.full(len(drift), WANDER)
    change = np.abs(np.diff(drift)) - uncertain[1:] - uncertain[:-1]
    for neighbour in (np.append(change, np.nan), np.append(np.nan, change)):
        wander = np.fmax(wander, neighbour)
    return np.nan_to_num(drift), wander


def _outside(offsets: ClockOffsets) -> tuple[Floats, Floats]:
    """The same for times before the first or after the last meeting: there the drift of the
    nearest stretch goes on, if that is long enough to tell it."""
    if len(offsets) < 2:
        return np.zeros(1), np.array([offsets.most_drift])
    drift, wander = _within(offsets)
    wander = wander + _uncertain(offsets)
    unknown = offsets.was_set | (wander > offsets.most_drift)
    return np.where(unknown, 0.0, drift), np.where(unknown, offsets.most_drift, wander)


def _uncertain(offsets: ClockOffsets) -> Floats:
    """Return how far off the drift of each stretch may be."""
    uncertain: Floats = (offsets.error_ns[1:] + offsets.error_ns[:-1]) / offsets.elapsed_ns
    return uncertain


# One clock for the collectives of the whole run, by the clock rounds that capture made in it.
#
# Ranks of one host share a clock. In a large job one rank per host takes part in the rounds, and
# what it found holds for the others of its host.

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
    """Align the ranks that kept their collectives."""
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
    """Shift the calls to the reference's clock; drop those between two meetings where a clock was
    set."""
    offset, error, known = offset_at(offsets, run.arrival_ns, run.number)
    shifted = run.arrival_ns - offset
    usual = quantile(error[known], _USUAL) if known.any() else 0.0
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
