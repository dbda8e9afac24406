"""What NCCL (or RCCL) logs about itself: which ranks talk to which, and over what.

Records carry the line of the log where a reader can look them up.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# The first three connect two ranks; COLLNET is a network that reduces by itself.
Family = Literal["P2P", "SHM", "NET", "COLLNET", "other"]
SOCKET = "Socket"


class NcclFact(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence of NCCL's that is kept word for word."""

    text: str
    line: int


class NcclProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process: its version, devices and settings."""

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
    settings: dict[str, str] = {}  # NCCL_* variables that NCCL reports
    facts: tuple[NcclFact, ...] = ()
    ranks: dict[str, int] = {}  # communicator id -> this process's rank in it


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's neighbours in one ring."""

    channel: int
    previous: int
    next: int


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's parent and children in one tree; -1 is none."""

    channel: int
    up: int
    down: tuple[int, ...]


class NcclLink(msgspec.Struct, frozen=True, kw_only=True):
    """All channels between two ranks over one transport. `transport` is NCCL's own text."""

    from_rank: int
    to_rank: int | None  # None: the network itself reduces
    own_rank: int  # the one of the two whose process logged it
    channels: tuple[int, ...]
    transport: str
    family: Family
    network: str = ""
    gdrdma: bool = False
    line: int


class Communicator(msgspec.Struct, frozen=True, kw_only=True):
    """One communicator as one process sees it; `id` is the same for all its ranks, "" if unknown.

    `guessed_lines` counts lines that name no communicator and were assigned to this one because
    the thread or the rank matches.
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
    links: tuple[NcclLink, ...] = ()
    guessed_lines: int = 0
    calls: int = 0


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """How often NCCL chose this algorithm for calls of one kind and size; only rank 0 logs it."""

    kind: str | None  # not printed before 2.23
    size_bytes: int  # as NCCL prints it: newer versions print one rank's part of an all-gather
    algorithm: str
    protocol: str
    first_channel: int | None
    last_channel: int | None
    count: int


class NcclWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A line at level WARN: something went wrong."""

    process: int
    source: str
    text: str
    line: int  # where it appears first
    count: int


class NcclLog(msgspec.Struct, frozen=True, kw_only=True):
    """One file. lines = read + foreign_lines + unread_lines + damaged_lines."""

    path: str
    processes: tuple[NcclProcess, ...]
    communicators: tuple[Communicator, ...]
    choices: tuple[Choice, ...]
    warnings: tuple[NcclWarning, ...]
    warnings_left_out: int
    versions: tuple[str, ...]
    lines: int
    foreign_lines: int  # not NCCL's
    unread_lines: int  # NCCL's, about things that are not kept
    damaged_lines: int  # NCCL's, but cut or mixed with another line
    ended_early: str | None = None


class CommunicatorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One communicator, put together from all logs."""

    id: str
    nranks: int | None
    ranks_seen: int
    hosts: tuple[str, ...]
    nodes: int | None
    channels: tuple[int, ...]  # distinct counts: there should be one
    transports: tuple[str, ...]  # commonest first
    calls: int
    complete: bool


class TransportRow(msgspec.Struct, frozen=True, kw_only=True):
    """All links of one communicator over one transport; a link that both ends log counts once."""

    communicator: str
    transport: str
    family: Family
    pairs: int
    channels: int
    within_host: bool | None  # None: the peer's host is not known, or some are and some are not
