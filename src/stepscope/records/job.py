"""What several ranks show together: one clock, collectives joined across ranks, who waits for whom.

`CollectiveCalls` and `RankSteps` come from one rank, with times on its own clock. `Job` is the
result for all ranks, with times on the reference rank's clock. Times are integer nanoseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stepscope.records.host_load import HostLoad
    from stepscope.records.quality import Note

    Int8 = NDArray[np.int8]
    Int32 = NDArray[np.int32]
    Int64 = NDArray[np.int64]

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "barrier",
    "send_recv",
    "send",
    "recv",
    "gather",
    "scatter",
    "reduce",
    "other",
)
# Nobody leaves one of these before everybody has come.
SYNCHRONISING = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))

Cause = Literal["compute", "input", "link"]
StragglerVerdict = Literal["none", "found", "not resolved", "one rank only"]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A process group as a rank knows it; `ranks` is empty where the trace does not list them."""

    name: str
    description: str = ""
    size: int | None = None
    ranks: tuple[int, ...] = ()


class CollectiveCalls(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's collectives in the order they were called."""

    groups: tuple[Group, ...]
    kind: Int8  # index into KINDS
    group: Int32  # index into groups
    sequence: Int64  # the group's own count, ABSENT where it was not recorded
    size_bytes: Int64  # total bytes as definitions have it, ABSENT where unknown
    peer: Int32  # the other rank of a send or receive, or a broadcast's root; else ABSENT
    step: Int32  # index into the rank's RankSteps, ABSENT outside every step
    arrival_ns: Int64  # on a device: its kernel began; on the CPU: the call was made
    start_ns: Int64  # the communication itself
    end_ns: Int64
    exposed_ns: Int64  # the part of it that no compute hides

    def __len__(self) -> int:
        return len(self.start_ns)


class RankSteps(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's steps, each divided. `own_ns` is what the rank needs when it waits for nobody."""

    number: Int64  # the step's number as the profiler counts, equal on all ranks
    start_ns: Int64
    dur_ns: Int64
    compute_ns: Int64
    exposed_comm_ns: Int64
    input_ns: Int64  # waiting for data while no work runs

    @property
    def own_ns(self) -> Int64:
        return self.dur_ns - self.exposed_comm_ns

    def __len__(self) -> int:
        return len(self.number)


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's typical recorded step, medians. step = own + exposed_comm. Every surface that
    compares ranks shows these."""

    step_ms: float
    own_ms: float
    exposed_comm_ms: float
    compute_ms: float
    input_ms: float


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """Meetings of all ranks that capture held: nobody left one before everybody had come."""

    label: str
    step: int | None
    came_ns: Int64
    left_ns: Int64


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """How one process takes part in its job, as capture saw it."""

    pid: int | None
    world_size: int  # as the process group, else the launcher says; 1 for a process on its own
    steps: int  # it has trained
    groups: int  # process groups of more than one rank
    joined: bool  # DDP, FSDP, DTensor parameters, pipeline stages or RPC
    trained_bytes: int | None
    shared: bool | None  # all that it trains lies in shared memory; None: not told
    exchanged_bytes: int | None  # a recorded step; None where a call does not tell its size
    calls_before: int  # collectives that the flight recorder holds of all the run


class RankFolder(msgspec.Struct, frozen=True, kw_only=True):
    """What lies beside a trace in a run folder; every part may be missing."""

    host: str | None = None
    pid: int | None = None
    world_size: int | None = None
    steps: int = 0
    rounds: tuple[Rounds, ...] = ()
    layout: dict[str, Any] = {}  # rank.json's "communication": groups, ddp, placements, stages
    comms: tuple[dict[str, Any], ...] = ()  # comms.jsonl, a dictionary a line
    notes: tuple[Note, ...] = ()  # what in these files could not be read
    load: HostLoad | None = None  # rank.json's "host_load"


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank brings to the job's view."""

    rank: int
    calls: CollectiveCalls
    pace: RankSteps
    rounds: tuple[Rounds, ...] = ()
    host: str | None = None
    world_size: int | None = None
    member: Membership | None = None  # None for a bare trace


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """Each rank's clock against the reference's: offset = rank's - reference's, at `at_ns`."""

    aligned: bool
    reference: int | None = None
    at_ns: int = 0
    offset_ns: dict[int, int] = {}
    error_ns: dict[int, int] = {}  # half the width of what is possible, over the whole window
    drift_ppm: dict[int, float] = {}
    sources: tuple[str, ...] = ()  # of "rounds", "collectives"
    unconnected: tuple[int, ...] = ()  # ranks that nothing connects to the reference
    contradicts: bool = False  # the ranks' times cannot all be true
    detail: str = ""  # a sentence: how, or why not

    def shift_ns(self, rank: int, times: Int64) -> Int64:
        """A rank's times on the reference's clock."""
        moved: Int64 = times - self.offset_ns.get(rank, 0)
        drift = self.drift_ppm.get(rank, 0.0) * 1e-6
        return moved - ((moved - self.at_ns) * drift).astype(moved.dtype) if drift else moved


class JobCollective(msgspec.Struct, frozen=True, kw_only=True):
    """All collectives of one kind, group and size, joined across the ranks that saw them.

    The transfer begins when the last rank has come. Bandwidth is over the part of it in which data
    could move, without what a call waited behind earlier ones.
    """

    kind: str
    group: str
    description: str
    group_size: int | None
    ranks_seen: int
    size_bytes: int | None
    count: int
    wait_ns: int | None  # mean over ranks, summed over calls; None where clocks do not resolve it
    wait_error_ns: int | None
    transfer_ns: int | None  # summed over calls
    exposed_ns: int  # mean over ranks, summed over calls
    algbw_gb_s: float | None
    busbw_gb_s: float | None
    expected_ns: float | None = None  # one transfer by this machine's calibration
    slowest_rank: int | None = None  # most often the last to come


class LastArriver(msgspec.Struct, frozen=True, kw_only=True):
    """How often everybody waited for this rank."""

    rank: int
    times_last: int
    of: int
    lead_ns: int  # median time between the last but one and this rank, where it was last
    waits_ns: int  # what this rank itself waited for others, a step


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """One rank (or, for a link, one group) that slows the others."""

    rank: int | None
    cause: Cause
    slowdown: float  # its own time over the median rank's; for a link transfer over expectation
    cost_ms: float  # what a step would gain
    steps: int  # in how many of the steps looked at
    of: int
    group: str | None = None
    evidence: tuple[str, ...] = ()


class Stragglers(msgspec.Struct, frozen=True, kw_only=True):
    """Who slows the job, and why; "none" is an answer."""

    verdict: StragglerVerdict
    ranks: tuple[Straggler, ...] = ()
    detail: str = ""


class PathPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the critical path: this rank's work, or a transfer between ranks."""

    rank: int
    kind: Literal["work", "input", "transfer"]
    start_ns: int
    end_ns: int
    label: str


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank, which work and which transfer decided one step; the pieces fill it."""

    step: int
    start_ns: int
    end_ns: int
    pieces: tuple[PathPiece, ...]
    share_by_rank: dict[int, float]  # of work and input
    transfer_share: float


class Lanes(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of some ranks on the one clock, for the picture; `match` joins them."""

    ranks: tuple[int, ...]
    match: Int64
    rank: Int32
    kind: Int8
    size_bytes: Int64
    arrival_ns: Int64
    last_ns: Int64  # when the last rank of its group came, drawn or not
    start_ns: Int64
    end_ns: Int64
    step_rank: Int32  # the steps of the same ranks
    step_number: Int64
    step_start_ns: Int64
    step_end_ns: Int64


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks together. The matrices are (steps, ranks), as recorded under the profiler; -1 where
    a rank lacks the step. `times` are the ranks' typical steps, in the order of `ranks`."""

    ranks: tuple[int, ...]
    times: tuple[RankTimes, ...]
    hosts: dict[int, str]
    steps: tuple[int, ...]
    step_ns: Int64
    own_ns: Int64
    input_ns: Int64
    exposed_comm_ns: Int64
    clock: Clock
    collectives: tuple[JobCollective, ...]
    arrivals: tuple[LastArriver, ...]
    stragglers: Stragglers
    path: CriticalPath | None
    lanes: Lanes | None
    notes: tuple[Note, ...] = ()
    members: tuple[Membership | None, ...] = ()  # in the order of `ranks`
    step_ms: float = 0.0  # of record; 0 where only recorded steps are known
