"""Who takes part, how far each worker is, and who may read: the rules, without any network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stepscope.records.together import member_name

if TYPE_CHECKING:
    from stepscope.records.consistency import Consistency


@dataclass(kw_only=True, slots=True)
class MemberClock:
    """One life of a worker. `count` is its number of finished pushes, from where it started."""

    rank: int
    life: int
    start: int
    count: int
    heard_at: float
    sync_points: int = 0

    @property
    def name(self) -> str:
        return member_name(self.rank, self.life)


@dataclass(kw_only=True, slots=True)
class ClockTable:
    """The coordinator's knowledge of all members."""

    consistency: Consistency
    expected: int = 0  # the first clock begins when so many have joined
    members: dict[str, MemberClock] = field(default_factory=dict)
    gone: dict[str, MemberClock] = field(default_factory=dict)
    closed: int = 0  # strong: clocks that all shards have applied
    _lives: dict[int, int] = field(default_factory=dict)
    _floor: int = 0  # where a worker starts that joins nobody
    _sync_floor: int = 0
    _contributors: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    _started: bool = False

    # Coming and going

    def free_rank(self) -> int:
        taken = {member.rank for member in self.members.values()}
        return next(rank for rank in range(len(taken) + 1) if rank not in taken)

    def member_of(self, rank: int) -> MemberClock | None:
        """The living member of this rank."""
        return next((one for one in self.members.values() if one.rank == rank), None)

    def plan_member(self, rank: int, now: float) -> MemberClock:
        """A new life of this rank, not yet part of the table."""
        life = self._lives.get(rank, 0)
        self._lives[rank] = life + 1
        start = self._start(rank)
        return MemberClock(
            rank=rank,
            life=life,
            start=start,
            count=start,
            heard_at=now,
            sync_points=min(
                (one.sync_points for one in self.members.values()), default=self._sync_floor
            ),
        )

    def add(self, member: MemberClock) -> None:
        self.members[member.name] = member
        self._started = self._started or len(self.members) >= self.expected

    def remove(self, name: str) -> MemberClock:
        """What it finished stays: a strong clock still applies gradients that were counted."""
        member = self.gone[name] = self.members.pop(name)
        self._floor = max(self._floor, member.count)
        self._sync_floor = max(self._sync_floor, member.sync_points)
        return member

    def overdue(self, now: float, deadline_s: float) -> list[str]:
        return [name for name, one in self.members.items() if now - one.heard_at > deadline_s]

    def _start(self, rank: int) -> int:
        if self.consistency.synchronous:
            # An earlier life may have given its gradient to the clock that is still open.
            earlier = [one.count for one in self.gone.values() if one.rank == rank]
            return max([self.closed, *earlier])
        return min((one.count for one in self.members.values()), default=self._floor)

    # Reading

    def blockers(self, name: str, clock: int) -> list[int]:
        """Ranks that this member must wait for before it reads at `clock`, the furthest behind
        first."""
        gap = self.consistency.largest_gap
        if gap is None:
            return []
        others = [one for one in self.members.values() if one.name != name]
        behind = [one for one in others if clock - one.count > gap]
        return [one.rank for one in sorted(behind, key=lambda one: (one.count, one.rank))]

    def may_read(self, name: str, clock: int) -> bool:
        if not self._started:
            return False
        if self.consistency.synchronous:
            return self.closed >= clock
        return not self.blockers(name, clock)

    def reached_by_all(self, number: int) -> bool:
        """Every member came to its sync point of this number."""
        return all(one.sync_points >= number for one in self.members.values())

    # Finishing

    def finish(self, name: str, clock: int) -> None:
        member = self.members[name]
        if clock != member.count:
            return  # repeated
        member.count += 1
        if self.consistency.synchronous:
            self._contributors.setdefault(clock, []).append((member.rank, name))

    def closable(self) -> tuple[str, ...] | None:
        """The members whose gradients make the next strong clock, in order of rank; None while
        one is missing."""
        if not self.consistency.synchronous or not self._started:
            return None
        contributors = self._contributors.get(self.closed)
        if not contributors or any(one.count <= self.closed for one in self.members.values()):
            return None
        return tuple(name for _, name in sorted(contributors))

    def close(self) -> None:
        self._contributors.pop(self.closed, None)
        self.closed += 1
