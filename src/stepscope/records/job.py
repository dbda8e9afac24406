"""What several ranks show together: one clock, collectives joined across ranks, who waits
for whom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stepscope.records.quality import Note
    from stepscope.records.rank_facts import DataFacts, HostLink, HostLoad, NetworkPlace, RankLinks
    from stepscope.records.trace import Int8, Int32, Int64

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Places = NDArray[np.int32]

KINDS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"),
    *("send_recv", "send", "recv", "gather", "scatter", "reduce", "other"),
)
# No rank leaves one of these before all have arrived.
SYNCHRONISING = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))

RUN_LABEL = "run"  # of clock rounds that lie outside the profiler's windows

Cause = Literal["compute", "input", "link"]
# Late at every step, in some steps, or a different rank each time.
LatenessKind = Literal["constant", "intermittent", "wandering"]
LatenessSource = Literal["window", "every step"]
# Who is to blame: one rank, all ranks of a host alike, or a link between hosts.
StragglerScope = Literal["rank", "host", "link"]
# Whether all ranks of a collective's group are on one host.
Reach = Literal["inside host", "between hosts"]
StragglerVerdict = Literal["none", "found", "not resolved", "one rank only"]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A process group as one rank knows it; `ranks` is empty if the trace does not list them."""

    name: str
    description: str = ""
    size: int | None = None
    ranks: tuple[int, ...] = ()


class CollectiveCalls(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's collectives in the order they were called."""

    groups: tuple[Group, ...]
    kind: Int8  # index into KINDS
    group: Int32  # index into groups
    sequence: Int64  # the group's own count, ABSENT if not recorded
    size_bytes: Int64  # total bytes (docs/reference/json.md), ABSENT if unknown
    peer: Int32  # the other rank of a send or receive, or a broadcast's root; else ABSENT
    step: Int32  # index into the rank's RankSteps, ABSENT outside all steps
    arrival_ns: Int64  # on a device: its kernel began; on the CPU: the call began
    start_ns: Int64  # the communication itself
    end_ns: Int64
    exposed_ns: Int64  # the part that no compute hides

    def __len__(self) -> int:
        return len(self.start_ns)


class RankSteps(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's steps and their parts. `own_ns` is the step without waiting for other ranks."""

    number: Int64  # the profiler's step number, equal on all ranks
    start_ns: Int64
    dur_ns: Int64
    compute_ns: Int64
    exposed_comm_ns: Int64
    input_ns: Int64  # waiting for data while no device work runs

    @property
    def own_ns(self) -> Int64:
        return self.dur_ns - self.exposed_comm_ns

    def __len__(self) -> int:
        return len(self.number)


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's typical recorded step, as medians. step = own + exposed_comm. Every surface that
    compares ranks shows these."""

    step_ms: float
    own_ms: float
    exposed_comm_ms: float
    compute_ms: float
    input_ms: float


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """Clock rounds of capture: no rank leaves one before all have arrived."""

    label: str
    step: int | None
    came_ns: Int64
    left_ns: Int64
    perf_to_unix_ns: int | None = None  # the wall clock minus a counter that nobody can set


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """How one process takes part in its job, as capture saw it."""

    pid: int | None
    world_size: int  # from the process group, else the launcher; 1 for a process on its own
    steps: int  # trained so far
    groups: int  # process groups of more than one rank
    joined: bool  # DDP, FSDP, DTensor parameters, pipeline stages or RPC
    trained_bytes: int | None
    shared: bool | None  # all trained parameters are in shared memory; None: unknown
    exchanged_bytes: int | None  # per recorded step; None if the size of a call is unknown
    calls_before: int  # collectives of the whole run in the flight recorder


class ClockKeeping(msgspec.Struct, frozen=True, kw_only=True):
    """Who keeps a host's clock, as its kernel says; None: not known."""

    host: str | None = None
    synchronised: bool | None = None  # by NTP or PTP
    estimated_error_ns: int | None = None
    maximum_error_ns: int | None = None
    ptp_devices: tuple[str, ...] = ()


class ClockSet(msgspec.Struct, frozen=True, kw_only=True):
    """A clock was set between two meetings; `by_ns` is negative when it was set back."""

    after_step: int | None
    before_step: int | None
    by_ns: int


class HostClock(msgspec.Struct, frozen=True, kw_only=True):
    """A host's clock against the reference's host, at the meeting closest to the window, and how
    it went on over the run. None: no meeting, or one only."""

    host: str
    ranks: tuple[int, ...]
    offset_ns: int | None = None
    error_ns: int | None = None
    drift_ppm: float | None = None  # mean over the run
    meetings: int = 0
    was_set: tuple[ClockSet, ...] = ()
    synchronised: bool | None = None
    estimated_error_ns: int | None = None
    maximum_error_ns: int | None = None
    ptp_devices: tuple[str, ...] = ()


class SimilarRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a run looks like one of a search: the same script with other arguments."""

    script: str
    count: int  # runs beside it of the same script, with other arguments
    options: tuple[str, ...] = ()  # its own arguments that searches have, such as --seed


class RankFolder(msgspec.Struct, frozen=True, kw_only=True):
    """The files next to a trace in a run folder; every part may be missing."""

    host: str | None = None
    network_place: NetworkPlace | None = None
    pid: int | None = None
    world_size: int | None = None
    steps: int = 0
    rounds: tuple[Rounds, ...] = ()
    keeping: ClockKeeping | None = None
    clock_notes: tuple[str, ...] = ()  # what went wrong in meetings
    layout: dict[str, Any] = {}  # rank.json's "communication": groups, ddp, placements, stages
    comms: tuple[dict[str, Any], ...] = ()  # comms.jsonl, one dictionary per line
    notes: tuple[Note, ...] = ()  # what in these files could not be read
    load: HostLoad | None = None  # rank.json's "host_load"
    data: DataFacts | None = None  # rank.json's "data"
    collectives: LoggedCollectives | None = None  # of the whole run
    links: RankLinks | None = None  # what its connections have sent
    similar: SimilarRuns | None = None  # None if the command is not known


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    calls: CollectiveCalls
    pace: RankSteps
    rounds: tuple[Rounds, ...] = ()
    keeping: ClockKeeping | None = None
    clock_notes: tuple[str, ...] = ()
    host: str | None = None
    network_place: NetworkPlace | None = None
    world_size: int | None = None
    member: Membership | None = None  # None for a bare trace
    run: RunCalls | None = None  # its collectives over the whole run
    links: RankLinks | None = None  # what its connections have sent


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """Every rank's clock against the reference: offset = rank - reference, at `at_ns`."""

    aligned: bool
    reference: int | None = None
    at_ns: int = 0
    offset_ns: dict[int, int] = {}
    error_ns: dict[int, int] = {}  # half the width of the possible range, over the whole window
    drift_ppm: dict[int, float] = {}
    sources: tuple[str, ...] = ()  # of "rounds", "collectives"
    unconnected: tuple[int, ...] = ()  # ranks that nothing connects to the reference
    contradicts: bool = False  # the ranks' times cannot all be true
    detail: str = ""  # a sentence: how, or why not
    hosts: tuple[HostClock, ...] = ()
    notes: tuple[str, ...] = ()  # sentences about meetings that failed

    def shift_ns(self, rank: int, times: Int64) -> Int64:
        """A rank's times on the reference's clock."""
        moved: Int64 = times - self.offset_ns.get(rank, 0)
        drift = self.drift_ppm.get(rank, 0.0) * 1e-6
        return moved - ((moved - self.at_ns) * drift).astype(moved.dtype) if drift else moved


class JobCollective(msgspec.Struct, frozen=True, kw_only=True):
    """All collectives of one kind, group and size, joined across the ranks that recorded them.

    The transfer begins when the last rank arrives. Bandwidth is over the time in which data could
    move, without the time a call was queued after earlier ones.
    """

    kind: str
    group: str
    description: str
    group_size: int | None
    ranks_seen: int
    size_bytes: int | None
    count: int
    wait_ns: int | None  # mean over ranks, summed over calls; None if clocks cannot resolve it
    wait_error_ns: int | None
    transfer_ns: int | None  # summed over calls
    exposed_ns: int  # mean over ranks, summed over calls
    algbw_gb_s: float | None
    busbw_gb_s: float | None
    expected_ns: float | None = None  # one transfer by this machine's calibration
    slowest_rank: int | None = None  # most often the last to arrive
    reach: Reach | None = None  # None where hosts or members are not known


class LastArriver(msgspec.Struct, frozen=True, kw_only=True):
    """How often all other ranks waited for this one."""

    rank: int
    times_last: int
    of: int
    lead_ns: int  # when last: median time after the last but one
    waits_ns: int  # its own waiting for others, per step
    wait_error_ns: int = 0  # how far off that may be


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, one host, or for a link one group or one pair of hosts, that slows the others."""

    rank: int | None
    cause: Cause
    slowdown: float  # its own time / the median rank's; for a link, transfer / expectation
    cost_ms: float  # what a step would gain
    steps: int  # in which it was slow
    of: int  # steps examined
    group: str | None = None
    evidence: tuple[str, ...] = ()
    kind: LatenessKind = "constant"
    one_in: int | None = None  # late in one of so many steps; None for one that is always late
    excess_ms: float | None = None  # its lateness in the steps in which it was late
    p_value: float | None = None  # that chance alone looks like this; None if the window shows it
    source: LatenessSource = "window"
    scope: StragglerScope = "rank"
    host: str | None = None  # the rank's or link's; None where hosts are not known
    ranks: tuple[int, ...] = ()  # of a slow host
    link: tuple[str, str] | None = None  # from this host to that one


class Stragglers(msgspec.Struct, frozen=True, kw_only=True):
    """Which ranks slow the job, and why; "none" is an answer."""

    verdict: StragglerVerdict
    ranks: tuple[Straggler, ...] = ()
    detail: str = ""
    source: LatenessSource = "window"
    wandering: Straggler | None = None  # a different rank is late each time: none is to blame

    @property
    def accused(self) -> list[int]:
        """Ranks that are slow by themselves, then those of slow hosts."""
        alone = [straggler.rank for straggler in self.ranks if straggler.rank is not None]
        return [*alone, *(rank for straggler in self.ranks for rank in straggler.ranks)]


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
    """Collectives of some ranks on one clock, for the picture; `match` joins them."""

    ranks: tuple[int, ...]
    match: Int64
    rank: Int32
    kind: Int8
    size_bytes: Int64
    arrival_ns: Int64
    last_ns: Int64  # arrival of the group's last rank, drawn or not
    start_ns: Int64
    end_ns: Int64
    step_rank: Int32  # the steps of the same ranks
    step_number: Int64
    step_start_ns: Int64
    step_end_ns: Int64


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks together. The matrices are (steps, ranks), as recorded under the profiler; -1 if a
    rank lacks the step. `times` are the ranks' typical steps, in the order of `ranks`."""

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
    step_ms: float = 0.0  # the step of record; 0 if only profiled steps are known
    run_arrivals: RunArrivals | None = None  # at the collectives of the whole run
    links: tuple[HostLink, ...] = ()  # between hosts, the slowest first
    places: dict[str, NetworkPlace] = {}  # of the hosts that tell theirs
    hierarchical: tuple[HierarchicalAllReduce, ...] = ()  # the longest first
    own_times: WorkerTimes | None = None  # of every step; None where waits are not known


# Collectives over the whole run: of one rank, with its steps, and joined over ranks.


class LoggedCollectives(msgspec.Struct, frozen=True, kw_only=True):
    """What capture kept of torch's flight recorder, in the order of creation. Stretches of a run
    with many collectives are missing."""

    groups: tuple[str, ...]
    names: tuple[str, ...]  # as torch's profiler calls them, like "gloo:all_reduce"
    group: Places  # index into groups
    name: Places  # index into names
    sequence: Ints  # the group's own count: equal on all its ranks
    created_ns: Ints  # the rank has arrived, by its own wall clock
    duration_ns: Ints | None = None  # on the device, where torch measured it

    def __len__(self) -> int:
        return len(self.sequence)


class RunArrivals(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals at the collectives of the run, joined over ranks. Matrices are (steps, ranks), with
    NaN where a rank took no part."""

    ranks: tuple[int, ...]
    number: Ints  # of the steps, in order
    late_ns: Floats  # arrival after the group's median arrival
    wait_ns: Floats  # until the last rank came
    error_ns: dict[int, float] = {}  # by rank: how far off its waits may be
    together: bool = True  # all ranks meet in the same collectives, not in groups of their own


class RunCalls(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's collectives in undisturbed steps, and what those steps spent in each phase."""

    groups: tuple[str, ...]
    group: Places  # index into groups
    sequence: Ints
    arrival_ns: Ints
    number: Ints  # of the step
    # The rank waits where it calls, so each collective of a step may be late by itself. Without,
    # it goes on, and its lateness grows up to the end of the step.
    blocking: bool
    on_host: bool  # the host waits, so it arrives when its work is done; a device may be behind it
    steps: Ints  # numbers, in order
    step_ns: Ints
    phases_ns: dict[str, Ints]  # of these steps
    cpu_wait_ns: Ints | None = None  # of these steps: ready to run, but no core was free

    def __len__(self) -> int:
        return len(self.sequence)


# How long each worker takes for its own work, step by step, without waiting for others.

# Every step of a run, the profiler's window, or what the workers of a parameter server recorded.
TimesSource = Literal["every step", "window", "server"]


class WorkerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """`own_ns` has one series per worker. If `side_by_side`, they are equally long and step n is
    the same step on all of them."""

    workers: tuple[int, ...]
    own_ns: tuple[Floats, ...]
    side_by_side: bool
    source: TimesSource


# An all-reduce in parts: inside hosts, between them, and inside hosts again.


class HierarchicalAllReduce(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduces made of parts inside hosts and between them. Their calls belong to a strategy
    too. Times are means over the ranks, per step."""

    ranks: tuple[int, ...]
    hosts: int  # in a group between hosts
    ranks_per_host: int  # in a group inside a host
    reduce: str  # the first part: reduce_scatter or reduce
    gather: str | None  # the last part: all_gather or broadcast; None if results stay sharded
    size_bytes: int  # of one
    count: float  # per step
    inside_ns: int  # first and last part
    between_ns: int
