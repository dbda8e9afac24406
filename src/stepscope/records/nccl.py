"""What NCCL (or RCCL) writes about itself: who talks to whom, over what, and every call.

A line number of the log stands beside whatever a person may want to look up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stepscope.records.explanation import Finding

    Int8 = NDArray[np.int8]
    Int16 = NDArray[np.int16]
    Int32 = NDArray[np.int32]
    Int64 = NDArray[np.int64]

# The first three are ways between two ranks; COLLNET is a network that reduces on its own.
Family = Literal["P2P", "SHM", "NET", "COLLNET", "other"]
SOCKET = "Socket"


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence of NCCL's that is worth keeping as it is."""

    text: str
    line: int


class NcclProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process: what it found on its machine and what it was told."""

    host: str
    pid: int
    version: str | None = None  # only one process of a communicator prints it
    device: int | None = None
    bus_id: str | None = None
    network: str | None = None  # "IB", "Socket", "AWS Libfabric"
    plugin: str | None = None  # an external network plugin
    tuner: str | None = None  # an external tuner
    interfaces: tuple[str, ...] = ()  # sockets
    adapters: tuple[str, ...] = ()  # InfiniBand, RoCE or libfabric devices
    settings: dict[str, str] = {}  # NCCL_* of the environment, as far as NCCL says so
    facts: tuple[Fact, ...] = ()
    ranks: dict[str, int] = {}  # communicator id -> this process's rank in it


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's neighbours in one ring."""

    channel: int
    previous: int
    next: int


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's parent and children in one tree; -1 is nobody."""

    channel: int
    up: int
    down: tuple[int, ...]


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """All channels between two ranks that go the same way. `transport` is NCCL's own text."""

    from_rank: int
    to_rank: int | None  # None: to the network's own reduction
    own_rank: int  # of the two, the one whose process wrote it
    channels: tuple[int, ...]
    transport: str
    family: Family
    network: str = ""
    gdrdma: bool = False
    line: int


class Communicator(msgspec.Struct, frozen=True, kw_only=True):
    """One communicator as one process sees it; `id` is the same for all its ranks, "" if unknown.

    `guessed_lines` counts lines that do not say whose they are and were given to this one because
    the thread or the rank fits.
    """

    process: int  # index into NcclLog.processes
    address: str
    id: str
    rank: int | None
    nranks: int | None
    line: int
    complete: bool
    device: int | None = None
    bus_id: str | None = None
    parent: str | None = None
    nodes: int | None = None
    local_ranks: int | None = None
    channels: int | None = None  # for collectives: rings, and as many trees
    nvls_channels: int | None = None
    p2p_channels: int | None = None
    p2p_channels_per_peer: int | None = None
    rings: tuple[Ring, ...] = ()
    trees: tuple[Tree, ...] = ()
    links: tuple[Link, ...] = ()
    guessed_lines: int = 0


class NcclOps(msgspec.Struct, frozen=True, kw_only=True):
    """Every call in the order of the log, as columns; -1 means absent."""

    algorithms: tuple[str, ...]
    protocols: tuple[str, ...]
    streams: tuple[str, ...]
    kind: Int8  # index into records.job.KINDS
    communicator: Int32  # index into NcclLog.communicators
    op_count: Int64  # NCCL's count; calls of one group share it
    count: Int64  # elements
    datatype: Int16  # NCCL's number
    size_bytes: Int64  # the whole: an all-gather's output, otherwise the input
    reduction: Int64
    root: Int32
    ranks: Int32
    stream: Int32  # index into streams
    line: Int64
    algorithm: Int8  # index into algorithms, as protocol into protocols
    protocol: Int8
    first_channel: Int16
    last_channel: Int16

    def __len__(self) -> int:
        return len(self.line)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """How often NCCL chose this way for calls of one kind and size (rank 0 says so)."""

    kind: str | None  # not printed before 2.23
    size_bytes: int  # as NCCL prints it: newer ones print a rank's part of an all-gather
    algorithm: str
    protocol: str
    first_channel: int | None
    last_channel: int | None
    count: int


class NcclWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A line at WARN, which NCCL keeps for what went wrong."""

    process: int
    source: str
    text: str
    line: int  # of the first
    count: int


class NcclLog(msgspec.Struct, frozen=True, kw_only=True):
    """One file. lines = read + foreign_lines + unread_lines + damaged_lines."""

    path: str
    processes: tuple[NcclProcess, ...]
    communicators: tuple[Communicator, ...]
    ops: NcclOps
    choices: tuple[Choice, ...]
    choices_unmatched: int  # lines on an algorithm with no call to go with
    warnings: tuple[NcclWarning, ...]
    warnings_left_out: int
    versions: tuple[str, ...]
    lines: int
    foreign_lines: int  # somebody else's output
    unread_lines: int  # NCCL's, on matters not kept here
    damaged_lines: int  # NCCL's, but cut or mixed with another line
    calls_left_out: int = 0  # beyond those that are kept
    ended_early: str | None = None


class NcclJoin(msgspec.Struct, frozen=True, kw_only=True):
    """A trace's calls and the log's, one to one. -1 where a call found none.

    Steps repeat, so the same run of calls may fit at several places; `places` counts them.
    Algorithm and protocol are those of the place taken, and of all others in all likelihood.
    """

    op: Int64  # for each call: index into the log's ops
    matched: int
    calls: int
    places: dict[str, int]  # group -> at how many places of the log its calls fit as well
    communicators: dict[str, int]  # group -> index into NcclLog.communicators


class CommunicatorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One communicator over all the logs at hand."""

    id: str
    nranks: int | None
    ranks_seen: int
    hosts: tuple[str, ...]
    nodes: int | None
    channels: tuple[int, ...]  # distinct counts: more than one is worth a look
    transports: tuple[str, ...]  # commonest first
    calls: int
    complete: bool


class TransportRow(msgspec.Struct, frozen=True, kw_only=True):
    """All links of one communicator that go the same way; a link that both ends log counts once."""

    communicator: str
    transport: str
    family: Family
    pairs: int
    channels: int
    within_host: bool | None  # None: the peer's host is not known, or both kinds


class NcclSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All logs of a job without their calls."""

    files: tuple[str, ...]
    versions: tuple[str, ...]
    processes: tuple[NcclProcess, ...]
    communicators: tuple[CommunicatorRow, ...]
    transports: tuple[TransportRow, ...]
    choices: tuple[Choice, ...]
    settings: dict[str, tuple[str, ...]]  # name -> distinct values over the processes
    warnings: tuple[NcclWarning, ...]  # `process` is an index into the processes here
    findings: tuple[Finding, ...]
    calls: int
    notes: tuple[str, ...]
