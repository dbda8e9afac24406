"""What workers, shards and the coordinator say to each other.

Every message may arrive late, twice or after a later one, and an answer may be lost: handling one
again changes nothing and gives the same answer. An *address* is whatever the network can reach: a
Ray actor, or a name in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Unreachable(Exception):  # noqa: N818 - a condition of the network, not a defect
    """No answer came. `dead`: the other process is known to have ended."""

    def __init__(self, why: str, *, dead: bool = False) -> None:
        super().__init__(why)
        self.dead = dead


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Where a shard is served, None while it is restored. The epoch grows when another actor takes
    over."""

    shard: int
    epoch: int
    address: Any


Routes = dict[int, Route]

# Worker -> coordinator


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """`token` is new for each life, and the same when the message is repeated."""

    token: str
    rank: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    member: str
    rank: int
    life: int
    clock: int
    sync_points: int  # that everybody has reached
    routes: Routes
    setup: Any  # ServerSetup, for workers that only know the server's name


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginClock:
    """May this member read at this clock?"""

    member: str
    clock: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MayRead:
    routes: Routes
    waited_for: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NotYet:
    """Ask again. `waiting_for` is a rank that holds the asker up."""

    waiting_for: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishClock:
    """All shards acknowledged this member's push, in these epochs."""

    member: str
    clock: int
    epochs: dict[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """The push is part of the history; no failure that a replica covers can lose it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SendAgain:
    """These shards were restored meanwhile."""

    shards: tuple[int, ...]
    routes: Routes


@dataclass(frozen=True, kw_only=True, slots=True)
class Evicted:
    """The member was silent for too long, or replaced; it may join again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReachSyncPoint:
    member: str
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    member: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StillHere:
    member: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportShard:
    """A shard did not answer. The answer, once it is served again, is a Found."""

    shard: int
    epoch: int
    dead: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    routes: Routes


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeCheckpoint:
    """One that is being taken answers everybody who asks meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadState:
    """All parameters, at one cut: the answer is a Cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """`shards` are the snapshots."""

    counts: dict[str, int]
    shards: tuple[Any, ...]


# Shard -> coordinator


@dataclass(frozen=True, kw_only=True, slots=True)
class DropBackup:
    """The primary of this epoch cannot reach its backup. Counted, or Stale if it is none."""

    shard: int
    epoch: int
    backup: str


# Worker -> shard


@dataclass(frozen=True, kw_only=True, slots=True)
class PushGradients:
    """`settings` are the optimizer's numbers (learning rate, ...), one dictionary per group."""

    member: str
    clock: int
    gradients: Any  # as compression.py packs them
    settings: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    epoch: int
    missing: tuple[str, ...] = ()  # members of a closed clock whose gradients a failure lost
    count: int | None = None  # of a fenced member: updates that this shard has
    counts: dict[str, int] | None = None  # of all members, if pushes are held


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """The shard's queue is full."""

    queue: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stale:
    """Another actor serves the shard now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadParameters:
    member: str
    clock: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """`flat` is an array of bytes, or a reference to one in the object store."""

    epoch: int
    flat: Any
    size_bytes: int
    seen: dict[str, int]


# Coordinator -> shard. Admit, Fence, CloseClock and BeginCut change its state, as pushes do.


@dataclass(frozen=True, kw_only=True, slots=True)
class Admit:
    member: str
    clock: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fence:
    """Take no more pushes of this member. Gradients of clocks from `counted` on are dropped."""

    member: str
    counted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseClock:
    """Apply the mean of these members' gradients, added up in this order."""

    clock: int
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldPushes:
    """Apply no push until this cut begins, which is at once."""

    cut: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginCut:
    """Keep the state that has exactly these counts of updates."""

    cut: int
    counts: dict[str, int]


Change = PushGradients | Admit | Fence | CloseClock | BeginCut


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchCut:
    cut: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CutAborted:
    """A member of the cut went away before its last update came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Promote:
    """A backup becomes the primary."""

    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AddBackup:
    """Bring this new actor up to date and repeat every change to it from now on."""

    backup: str
    address: Any


# Primary -> backup


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    epoch: int
    index: int  # of the last change in `snapshot`
    snapshot: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeat:
    epoch: int
    index: int
    change: Change


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfOrder:
    """A message that makes sense in no history; its sender has a defect."""

    why: str
