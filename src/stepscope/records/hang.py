"""What ranks record when steps no longer end, and the answer: who hangs, where, and who waits."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from stepscope.records.folders import ProcessIdentity
from stepscope.records.quality import Bytes, Count, Note, RankNumber, Ranks, StampNs, UnixS
from stepscope.records.source_lines import Place

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
# Counters of the system that were read twice: a process may have been replaced in between.
Change = Annotated[int, Meta(ge=-(1 << 50), le=1 << 50)]

# hang.json of a rank, as capture writes it (measure/hang).


class HangFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A line that runs; `own` if it is the user's, then with its text."""

    file: str = ""
    line: Count | None = None
    function: str = ""
    own: bool = False
    text: str = ""
    numbers: dict[str, Count] = {}  # arguments of torch's functions that name ranks

    @property
    def place(self) -> Place:
        return Place(file=self.file, line=self.line or 0, function=self.function)


class HangThread(msgspec.Struct, frozen=True, kw_only=True):
    """A Python thread, with the system's state of it where that is known."""

    name: str = ""
    native_id: Count | None = None
    trains: bool = False
    state: str = ""  # as in /proc: R, S, D, T, Z
    waits_in: str | None = None  # the kernel's function
    call: str = ""  # the system call
    file: str = ""  # on which the call works
    cpu_s: Seconds | None = None  # between two looks
    frames: list[HangFrame] = []  # innermost first


class HangMoved(msgspec.Struct, frozen=True, kw_only=True):
    """What a process did between two looks."""

    seconds: Seconds = 0.0
    cpu_s: Seconds | None = None
    input_bytes: Change | None = None
    output_bytes: Change | None = None
    disk_bytes: Change | None = None  # read
    major_faults: Change | None = None


class HangProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process as the system sees it: a rank from outside, or one that a rank has started."""

    pid: Count = 0
    rank: RankNumber | None = None
    folder: str = ""  # the rank's
    name: str = ""
    command: str = ""
    state: str = ""
    gone: bool = False
    waits_in: str | None = None
    call: str = ""
    file: str = ""
    rss_bytes: Bytes | None = None
    moved: HangMoved = HangMoved()
    lately: HangMoved = HangMoved()  # over some more seconds
    ended_by: str = ""  # "SIGKILL", "exit code 1": nobody has waited for it yet
    out_of_memory: Count = 0  # processes that its system has killed for memory meanwhile
    stderr: str = ""  # the file, or "a pipe", "a terminal"
    shares_stderr: bool = False  # with other ranks
    last_lines: list[str] = []  # of that file, when it ended
    threads: list[HangThread] = []  # of a loader worker that wrote its own stack
    native: str = ""  # what py-spy printed


class HangCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective as this rank entered it."""

    kind: str = ""
    group: str = ""
    sequence: Count | None = None
    p2p: bool = False
    size_bytes: Bytes | None = None
    input_sizes: list[list[Count]] | None = None
    dtype: str | None = None
    created_ns: StampNs | None = None
    ended: bool = False


class HangReached(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank came in one group."""

    entered: Count = 0
    ended: Count = 0


class HangGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A process group of the rank."""

    name: str = ""
    description: str = ""
    backend: str = ""
    size: Ranks | None = None
    ranks: list[RankNumber] = []
    ranges: list[tuple[RankNumber, RankNumber, Ranks]] = []  # first, last, distance


class HangCollectives(msgspec.Struct, frozen=True, kw_only=True):
    """What torch's own recorder holds."""

    groups: list[HangGroup] = []
    reached: dict[str, HangReached] = {}
    last: list[HangCollective] = []


class HangConnection(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP connection; `retries` of a segment that nobody acknowledges."""

    local: str = ""
    peer: str = ""
    unsent_bytes: Bytes = 0
    retries: Count = 0


class HangDevice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the GPU has done what was queued."""

    answers: bool = True
    busy: bool | None = None
    device: str | None = None
    error: str = ""


class WentOn(msgspec.Struct, frozen=True, kw_only=True):
    """It was no hang."""

    unix: UnixS | None = None
    how: str = ""


class HangRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank while no step ended."""

    rank: RankNumber | None = None
    world_size: Ranks | None = None
    noticed_unix: UnixS | None = None
    suspects: bool = True  # its own limit had passed; else it was asked
    silent_s: Seconds = 0.0
    limit_s: Seconds = 0.0
    usual_s: Seconds = 0.0
    phase: str = ""
    step: Count = 0
    identity: ProcessIdentity | None = None
    process: HangProcess = HangProcess()
    threads: list[HangThread] = []
    children: list[HangProcess] = []
    connections: list[HangConnection] = []
    collectives: HangCollectives | None = None
    device: HangDevice | None = None
    went_on: WentOn | None = None


class HostHang(msgspec.Struct, frozen=True, kw_only=True):
    """What `stepscope run` saw of its host's ranks from outside."""

    host: str = ""
    noticed_unix: UnixS | None = None
    ranks: list[HangProcess] = []


class LastWords(msgspec.Struct, frozen=True, kw_only=True):
    """The exception that ended a rank."""

    exception: str = ""
    place: Place | None = None


class HangRank(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one rank; `state` is that of its process now."""

    rank: RankNumber
    folder: str = ""
    world_size: Ranks | None = None
    status: str = ""  # of rank.json
    steps: Count | None = None
    pid: Count | None = None
    state: str = "unknown"
    record: HangRecord | None = None
    is_damaged: bool = False  # there is a record, which cannot be read
    outside: HangProcess | None = None
    last_words: LastWords | None = None


class HangEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """A run folder, read for `hang`."""

    folder: str
    ranks: tuple[HangRank, ...]
    world_size: Ranks | None = None
    hang_after_s: Seconds | None = None  # None: not written
    has_ended: bool = False
    quiet_s: Seconds | None = None  # since a step was written last
    notes: tuple[Note, ...] = ()


# The answer. Field names are the words of `hang --json` (docs/reference/json.md).

HangKind = Literal[
    "none",  # steps end, or went on
    "slow",  # something that is known to take long, or that still moves
    "missing",  # a rank never entered a collective
    "mismatch",  # ranks entered different collectives, or with different shapes
    "deadlock",  # groups or locks wait for each other
    "loader",  # a batch never comes
    "ended",  # a rank has ended
    "stopped",  # a rank is stopped by a signal
    "device",  # the GPU does not finish, or does not answer
    "unreachable",  # a peer does not answer
    "loop",  # Python runs and runs
    "blocked",  # a rank waits in a call of the system
    "unknown",
]


class HangingRanks(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks in the same state at the same line."""

    ranks: tuple[RankNumber, ...]
    words: str  # what they do
    where: Place | None = None
    text: str = ""  # that line
    at_fault: bool = False


class HangAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Who hangs, where, and who waits."""

    kind: HangKind
    verdict: str
    why: tuple[str, ...] = ()
    next: tuple[str, ...] = ()
    is_hang: bool = False
    ranks: tuple[RankNumber, ...] = ()  # at fault
    where: Place | None = None
    waiting: Count = 0  # ranks that wait for them
    seconds: Seconds | None = None  # how long, so far or until it went on
    groups: tuple[HangingRanks, ...] = ()
    last_lines: tuple[str, ...] = ()  # that a rank which ended wrote to stderr
    world_size: Ranks | None = None
    notes: tuple[Note, ...] = ()
