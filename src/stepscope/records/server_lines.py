"""What a parameter server's workers and shards write into the run folder. Standard library only:
the training process imports this file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

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

Mode = Literal["strong", "bounded", "eventual", "weak"]


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
