"""Processes and communicators, built up line by line."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from stepscope.records.nccl import Communicator, Fact, NcclLink, NcclProcess
from stepscope.trace.nccl_log.lines import NET

if TYPE_CHECKING:
    from stepscope.records.nccl import Family, Ring, Tree

    _LinkKey = tuple[int, int | None, int, str]  # from, to, own rank, transport

MOST_COMMS = 1024  # of one process
_LONGEST_ID = 256  # each split of a communicator makes it longer
_FAMILIES: tuple[Family, ...] = ("P2P", "SHM", "NET", "COLLNET")


# Fields of the record that the builder has under the same name.
_SAME_NAMES = (
    *("process", "line", "address", "id", "nranks", "device", "bus_id", "parent", "complete"),
    *("nodes", "local_ranks", "calls"),
)


class CommunicatorBuilder:
    def __init__(self, process: int, line: int, address: str = "") -> None:
        self.process = process
        self.line = line
        self.address = address
        self.id = ""
        self.rank: int | None = None
        self.nranks: int | None = None
        self.device: int | None = None
        self.bus_id: str | None = None
        self.parent: str | None = None
        self.complete = False
        self.nodes: int | None = None
        self.local_ranks: int | None = None
        self.counts: tuple[int | None, ...] = (None, None, None, None)
        self.rings: dict[int, Ring] = {}
        self.trees: dict[int, Tree] = {}
        self.links: dict[_LinkKey, tuple[int, set[int]]] = {}  # first line, channels
        self.guessed = 0
        self.calls = 0

    def fits(self, own: int | None, peer: int | None = None) -> bool:
        """Whether a line about these two ranks can belong to this communicator."""
        ranks_fit = own is None or self.own_rank() in (own, None)
        return ranks_fit and (peer is None or self.nranks is None or peer < self.nranks)

    def holds(self, *ranks: int) -> bool:
        """Whether all of these can be ranks of this communicator; -1 is none."""
        return self.nranks is None or max(ranks) < self.nranks

    def own_rank(self) -> int | None:
        return self.rank if self.rank is not None else next((k[2] for k in self.links), None)

    def add_link(self, key: _LinkKey, line: int, channel: int) -> None:
        self.links.setdefault(key, (line, set()))[1].add(channel)

    def absorb(self, other: CommunicatorBuilder) -> None:
        """Take over what was read before any line named the communicator."""
        self.links = other.links | self.links
        self.rings = other.rings | self.rings
        self.trees = other.trees | self.trees
        self.counts = other.counts if self.counts[0] is None else self.counts
        self.guessed += other.guessed
        other.links = {}

    def drop_impossible_ranks(self) -> int:
        """Drop lines about ranks that do not exist: the world size may be logged after them."""
        before = len(self.links) + len(self.rings) + len(self.trees)
        self.links = {
            key: seen for key, seen in self.links.items() if self.holds(key[0], key[1] or 0)
        }
        self.rings = {k: r for k, r in self.rings.items() if self.holds(r.previous, r.next)}
        self.trees = {k: t for k, t in self.trees.items() if self.holds(t.up, *t.down)}
        return before - len(self.links) - len(self.rings) - len(self.trees)

    def record(self) -> Communicator:
        channels, nvls, p2p, per_peer = self.counts
        return Communicator(
            **{name: getattr(self, name) for name in _SAME_NAMES},
            rank=self.own_rank(),
            channels=channels,
            nvls_channels=nvls,
            p2p_channels=p2p,
            p2p_channels_per_peer=per_peer,
            rings=tuple(self.rings[channel] for channel in sorted(self.rings)),
            trees=tuple(self.trees[channel] for channel in sorted(self.trees)),
            links=tuple(_link(key, *seen) for key, seen in self.links.items()),
            guessed_lines=self.guessed,
        )


class ProcessBuilder:
    def __init__(self, index: int, host: str, pid: int, device: int) -> None:
        self.index = index
        self.host = host
        self.pid = pid
        self.device = device
        self.words: dict[str, str] = {}  # version, network, plugin, tuner
        self.interfaces: dict[str, None] = {}
        self.adapters: dict[str, None] = {}
        self.settings: dict[str, str] = {}
        self.facts: dict[str, int] = {}
        self.comms: list[CommunicatorBuilder] = []  # in the order of their first line
        self.by_address: dict[str, CommunicatorBuilder] = {}
        self.opened: dict[bytes, CommunicatorBuilder] = {}  # thread -> the one it initialises
        # Thread -> lines that name no communicator yet.
        self.unnamed: dict[bytes, CommunicatorBuilder] = {}
        self.says_start = False  # before 2.18.3 only the end of an initialisation is logged
        self.last_used: CommunicatorBuilder | None = None
        self.splits: Counter[str] = Counter()

    def settle(self) -> None:
        """Assign lines that name no communicator to the latest one that fits."""
        for unnamed in self.unnamed.values():
            named = (comm for comm in reversed(self.comms) if comm.address)
            home = next((comm for comm in named if comm.fits(unnamed.own_rank())), None)
            if home is not None:
                home.absorb(unnamed)

    def record(self) -> NcclProcess:
        return NcclProcess(
            host=self.host,
            pid=self.pid,
            device=next((c.device for c in self.comms if c.device is not None), self.device),
            bus_id=next((c.bus_id for c in self.comms if c.bus_id), None),
            **self.words,
            interfaces=tuple(self.interfaces),
            adapters=tuple(self.adapters),
            settings=self.settings,
            facts=tuple(Fact(text=text, line=line) for text, line in self.facts.items()),
            ranks={c.id: c.rank for c in self.comms if c.id and c.rank is not None},
        )


class At(NamedTuple):
    process: ProcessBuilder
    thread: bytes
    line: int


def claim_unnamed(at: At, rank: int, address: str) -> CommunicatorBuilder | None:
    """What this thread logged before it named the communicator that it initialises."""
    process = at.process
    unnamed = process.unnamed.get(at.thread)
    if process.says_start or unnamed is None or not unnamed.fits(rank):
        return None
    del process.unnamed[at.thread]
    unnamed.address = address
    process.by_address[address] = unnamed
    return unnamed


def name_communicator(
    process: ProcessBuilder,
    comm_id: str | None,
    parent: str | None,
    split: str | None,
    color: str | None,
) -> str:
    """An id that is the same on every rank. Since 2.23 a split logs its parent instead of an id."""
    if comm_id or not parent:
        return comm_id or ""
    count = split or str(process.splits[parent])
    process.splits[parent] += 1
    origin = process.by_address.get(parent)
    child = f"{origin.id}/{count}.{color}" if origin and origin.id else ""
    return child if len(child) <= _LONGEST_ID else ""


def _link(key: _LinkKey, line: int, channels: set[int]) -> NcclLink:
    source, target, own, transport = key
    net = NET.match(transport)
    return NcclLink(
        from_rank=source,
        to_rank=target,
        own_rank=own,
        channels=tuple(sorted(channels)),
        transport=transport,
        family=_family(transport),
        network=net[1] if net else "",
        gdrdma="/GDRDMA" in transport,
        line=line,
    )


def _family(transport: str) -> Family:
    for family in _FAMILIES:
        if transport.startswith(f"{family}/"):
            return family
    return "SHM" if "shared memory" in transport else "other"  # the wording until 2.12
