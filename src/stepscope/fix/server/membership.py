"""Who takes part, how far each worker is and who may read; where each shard is served, and
who takes over when its actor dies. Knows no network.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from stepscope.fix.server import messages as msg

if TYPE_CHECKING:
    from stepscope.fix.server.shard_state import ShardSnapshot
    from stepscope.records.change_values import Consistency, Mode


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
        """Remove a member; a strong clock still applies the gradients that were counted."""
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


# Where each shard is served, and who takes over when its actor dies.

_PING_S = 1.0
_PAUSE_S = 1.0  # before another backup is tried


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long silence is borne."""

    worker_deadline_s: float = 30.0
    shard_deadline_s: float = 10.0


class CoordinatorSurroundings(Protocol):
    """The cluster, as the coordinator needs it."""

    async def ask(self, address: Any, message: Any, timeout_s: float | None = None) -> Any:
        """Raises Unreachable."""

    async def start_shard(
        self, shard: int, epoch: int, snapshot: ShardSnapshot | None, copy: int
    ) -> tuple[str, Any]:
        """A new actor's name and address: a primary with a snapshot, a backup without."""

    def stop_shard(self, address: Any) -> None:
        """End an actor that is not needed any more, if it still lives."""

    async def keep_cut(
        self, cut: int, counts: dict[str, int], shards: Sequence[ShardSnapshot]
    ) -> None:
        """Save a checkpoint."""

    def log(self, event: ServerEvent) -> None: ...


@dataclass(kw_only=True, slots=True)
class _Serving:
    """The actors of one shard; None for the primary while it is restored."""

    epoch: int
    primary: Any
    backups: dict[str, Any] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def run_in_background(tasks: set[Any], work: Any) -> None:
    """Run a coroutine; `tasks` holds it until it is done."""
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


class ShardDirectory:
    """`first` are the shards' values before any update, `last_cut` those of the last checkpoint."""

    def __init__(
        self,
        first: Sequence[ShardSnapshot],
        table: ClockTable,
        surroundings: CoordinatorSurroundings,
        *,
        replicas: int,
        deadline_s: float,
    ) -> None:
        self._first = list(first)
        self._table = table
        self._around = surroundings
        self._replicas = replicas
        self._deadline_s = deadline_s
        self._serving: dict[int, _Serving] = {}
        self.last_cut: Sequence[ShardSnapshot] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[int]:
        return iter(self._serving)

    async def start(self) -> None:
        """Start every shard and its backups."""
        started = await asyncio.gather(
            *(
                self._around.start_shard(shard, 1, snapshot, 0)
                for shard, snapshot in enumerate(self._first)
            )
        )
        for shard, (_, address) in enumerate(started):
            self._serving[shard] = _Serving(epoch=1, primary=address)
        await asyncio.gather(*(self.recruit(shard) for shard in self._serving))

    async def changed_since(self, epochs: Mapping[int, int]) -> tuple[int, ...]:
        """Shards that another actor serves now; returns when they are restored."""
        changed = tuple(
            shard
            for shard, serving in self._serving.items()
            if serving.primary is None or epochs.get(shard) != serving.epoch
        )
        for shard in changed:
            async with self._serving[shard].lock:
                pass
        return changed

    def routes(self) -> msg.Routes:
        return {
            shard: msg.Route(shard=shard, epoch=serving.epoch, address=serving.primary)
            for shard, serving in self._serving.items()
        }

    async def tell_all(self, message: Any) -> list[Any]:
        return await asyncio.gather(*(self.tell(shard, message) for shard in self._serving))

    async def tell(self, shard: int, message: Any) -> Any:
        """Until the shard has answered, restored if need be."""
        serving = self._serving[shard]
        while True:
            if serving.primary is None:
                async with serving.lock:
                    pass  # until it is restored
            epoch, address = serving.epoch, serving.primary
            try:
                answer = await self._around.ask(address, message)
            except msg.Unreachable as lost:
                await self.restore(shard, epoch, dead=lost.dead)
                continue
            if not isinstance(answer, msg.Stale):
                return answer
            await asyncio.sleep(_PING_S / 10)

    async def restore(self, shard: int, epoch: int, *, dead: bool) -> None:
        """A backup takes over; without one, the last checkpoint; without one, the beginning."""
        serving = self._serving[shard]
        async with serving.lock:
            if serving.epoch != epoch:
                return
            if not dead and await self._answers(serving.primary, msg.Ping()):
                return
            at, begun = time.time_ns(), time.monotonic_ns()
            gone, serving.primary, serving.epoch = serving.primary, None, epoch + 1
            self._around.stop_shard(gone)
            backups, serving.backups = serving.backups, {}
            source, lost = await self._take_over(shard, serving, backups)
            self._around.log(
                ShardRestored(
                    shard=shard,
                    epoch=serving.epoch,
                    source=source,
                    lost=lost,
                    at_unix_ns=at,
                    took_ns=time.monotonic_ns() - begun,
                    detail=restored_sentence(shard, source, lost),
                )
            )
        run_in_background(self._tasks, self.recruit(shard))

    async def _take_over(
        self, shard: int, serving: _Serving, backups: dict[str, Any]
    ) -> tuple[Any, tuple[LostUpdates, ...]]:
        """The source of the new primary's values, and what they lack."""
        for address in backups.values():
            if serving.primary is None and await self._answers(
                address, msg.Promote(epoch=serving.epoch)
            ):
                serving.primary = address
            else:
                self._around.stop_shard(address)
        if serving.primary is not None:
            return "replica", ()
        source, snapshot = "start", self._first[shard]
        if self.last_cut is not None:
            source, snapshot = "checkpoint", self.last_cut[shard]
        lost = lost_updates(snapshot, self._table)
        restored = as_of_now(snapshot, self._table)
        _, serving.primary = await self._around.start_shard(shard, serving.epoch, restored, 0)
        return source, lost

    async def _answers(self, address: Any, message: Any) -> bool:
        """Whether it agrees, before its time is up; asked again if no answer came."""
        until = asyncio.get_running_loop().time() + self._deadline_s
        while asyncio.get_running_loop().time() < until:
            try:
                answer = await self._around.ask(address, message, timeout_s=_PING_S)
            except msg.Unreachable as lost:
                if lost.dead:
                    return False
                await asyncio.sleep(_PING_S / 4)
                continue
            return isinstance(answer, msg.Ack)
        return False

    async def recruit(self, shard: int, after_s: float = 0.0) -> None:
        """Give the shard the backups that it should have."""
        await asyncio.sleep(after_s)
        serving = self._serving[shard]
        while True:
            async with serving.lock:
                if len(serving.backups) >= self._replicas:
                    return
                epoch, copy = serving.epoch, len(serving.backups) + 1
                try:
                    name, address = await self._around.start_shard(shard, epoch, None, copy)
                except msg.Unreachable:
                    return  # no machine to start it on
                serving.backups[name] = address
                try:
                    add = msg.AddBackup(backup=name, address=address)
                    await self._around.ask(serving.primary, add)
                    continue
                except msg.Unreachable as lost:
                    dead = lost.dead
                    serving.backups.pop(name, None)
                    self._around.stop_shard(address)
            await self.restore(shard, epoch, dead=dead)

    def drop_backup(self, message: msg.DropBackup) -> msg.Counted | msg.Stale:
        serving = self._serving[message.shard]
        if serving.epoch != message.epoch or serving.primary is None:
            return msg.Stale()
        address = serving.backups.pop(message.backup, None)
        if address is not None:
            self._around.stop_shard(address)
            run_in_background(self._tasks, self.recruit(message.shard, after_s=_PAUSE_S))
        return msg.Counted()


# What a shard lost that had to be restored from a checkpoint, and in words.

_SOURCES = {
    "replica": "its replica",
    "checkpoint": "the last checkpoint",
    "start": "its first values, because there was neither replica nor checkpoint",
}


def lost_updates(snapshot: ShardSnapshot, table: ClockTable) -> tuple[LostUpdates, ...]:
    """Counted updates of every member, also of those that have gone, that came after it."""
    lost = []
    for member in (*table.members.values(), *table.gone.values()):
        has = snapshot.counts.get(member.name, snapshot.fenced.get(member.name, member.start))
        if table.consistency.synchronous:
            has = min(has, max(snapshot.closed, member.start))
        if has < member.count:
            lost.append(LostUpdates(member=member.name, first=has, last=member.count - 1))
    return tuple(lost)


def as_of_now(snapshot: ShardSnapshot, table: ClockTable) -> ShardSnapshot:
    """Old values with the present clocks: the next push of each member is the one it now makes."""
    return replace(
        snapshot,
        # The snapshot may have a push that all shards got and the coordinator has yet to count.
        counts={
            name: max(one.count, snapshot.counts.get(name, 0))
            for name, one in table.members.items()
        },
        fenced={name: one.count for name, one in table.gone.items()},
        closed=table.closed,
        held={},
    )


def restored_sentence(shard: int, source: str, lost: Sequence[LostUpdates]) -> str:
    updates = sum(one.last - one.first + 1 for one in lost)
    if not updates:
        return f"shard {shard} was restored from {_SOURCES[source]}: no update was lost"
    return (
        f"shard {shard} was restored from {_SOURCES[source]}: it lost {updates} "
        f"{'update' if updates == 1 else 'updates'} of {len(lost)} workers"
    )


# What workers and shards write into the run folder.
#
#     <run>/together/
#       server.json                          one ServerFacts
#       worker-00003-0.jsonl                 rank 3, its first life: Pull, Push
#       shard-0000-1.jsonl                   shard 0, its first actor: UpdateApplied, PullServed
#       shard-0000-2.jsonl                   its second actor: a backup, or who took over
#       coordinator.jsonl                    MemberChange, ClockClosed, CheckpointCut, ShardRestored
#
# Every line is one record as a JSON object; its `event` names its type. All times are
# nanoseconds; `at_unix_ns` is the clock of the process that wrote it, as the thing began. A killed
# process leaves a last line that may be cut off: readers skip it.
#
# A worker's *clock* counts its finished pushes: its first pull and push have clock 0. A *member*
# is one life of a worker, written "rank.life": a worker that was evicted and came back is a new
# member. `seen` counts, for each member, its updates that the values read contain: with a pull of
# clock c, `c - min(seen)` over the other members is the read gap that bounded consistency limits.
# In strong consistency (also called bounded:0) the shards apply a clock's gradients at once, as
# their mean.


def worker_file(rank: int, life: int) -> str:
    """The file of one life of a worker."""
    return f"worker-{rank:05}-{life}.jsonl"


def shard_file(shard: int, actor: int) -> str:
    """The file of one actor of a shard. Its lines say whether it was a backup then."""
    return f"shard-{shard:04}-{actor}.jsonl"


def member_name(rank: int, life: int) -> str:
    return f"{rank}.{life}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFacts:
    """What one shard holds."""

    shard: int
    tensors: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """server.json: how the server was set up."""

    mode: Mode
    bound: int | None  # clocks: of staleness if bounded, of a copy's age if weak
    shards: tuple[ShardFacts, ...]
    replicas: int
    optimizer: str  # the class's name
    compression: str | None
    deadline_s: float  # a worker that is silent for so long is evicted
    started_unix_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull:
    """A worker read the parameters from all shards."""

    event: ClassVar[str] = "pull"
    worker: int  # rank
    life: int
    clock: int
    at_unix_ns: int
    blocked_ns: int  # until the consistency model let it read
    transfer_ns: int  # of asking the shards and copying the values
    size_bytes: int
    # The largest read gap over shards and other members; 0 without others; None if it was cached.
    gap: int | None
    waited_for: int | None = None  # the last rank that it was blocked by
    cached: bool = False  # weak consistency: the copy at hand was young enough
    seen: dict[str, dict[str, int]] = field(default_factory=dict)  # by shard, by member
    epochs: dict[str, int] = field(default_factory=dict)  # by shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """A worker's gradients reached all shards, and the coordinator counted the clock."""

    event: ClassVar[str] = "push"
    worker: int
    life: int
    clock: int
    step: int | None  # the caller's number for it, if any
    at_unix_ns: int
    compute_ns: int | None  # since its pull ended: the step's own work
    took_ns: int
    refused_ns: int  # of took_ns: waiting because a shard's queue was full
    size_bytes: int  # as sent, after compression
    resent: int = 0  # messages that were sent again
    loss: float | None = None  # if the caller gave it


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateApplied:
    """A shard changed its parameters: one optimizer step."""

    event: ClassVar[str] = "applied"
    shard: int
    epoch: int
    update: int  # number of this shard's optimizer steps before it
    clock: int
    members: tuple[str, ...]  # whose gradients: one, or all of a strong clock in order of rank
    at_unix_ns: int
    took_ns: int
    queue: int  # requests that waited at the shard when this one was taken up
    waited_ns: int  # of this request, in that queue
    replica: bool = False  # written by a backup that repeats its primary


@dataclass(frozen=True, kw_only=True, slots=True)
class PullServed:
    """A shard answered a pull."""

    event: ClassVar[str] = "served"
    shard: int
    epoch: int
    member: str
    clock: int
    at_unix_ns: int
    took_ns: int
    queue: int
    waited_ns: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberChange:
    """A worker came or went. `clock` is where it starts, or how many pushes it finished."""

    event: ClassVar[str] = "member"
    change: Literal["joined", "left", "evicted"]
    worker: int
    life: int
    clock: int
    at_unix_ns: int
    detail: str = ""  # a sentence for people
    torn: bool = False  # its last push reached some shards only: it died in the middle


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockClosed:
    """Strong consistency: all members finished this clock, and the shards applied it."""

    event: ClassVar[str] = "closed"
    clock: int
    members: tuple[str, ...]
    at_unix_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCut:
    """All shards saved the state that holds exactly these counts of each member's updates."""

    event: ClassVar[str] = "cut"
    cut: int  # number of the checkpoint
    counts: dict[str, int]
    at_unix_ns: int
    took_ns: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LostUpdates:
    """Updates of one member, clocks first to last, that a restored shard does not contain."""

    member: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRestored:
    """A shard's actor died and another took over."""

    event: ClassVar[str] = "restored"
    shard: int
    epoch: int  # of the new actor
    source: Literal["replica", "checkpoint", "start"]
    lost: tuple[LostUpdates, ...]
    at_unix_ns: int
    took_ns: int
    detail: str = ""  # a sentence for people


ServerEvent = (
    Pull
    | Push
    | UpdateApplied
    | PullServed
    | MemberChange
    | ClockClosed
    | CheckpointCut
    | ShardRestored
)


def event_line(event: ServerEvent) -> str:
    """One line of a log, with its end."""
    return json.dumps({"event": event.event, **asdict(event)}, separators=(",", ":")) + "\n"
