"""Read a log of NCCL in one pass: each line goes to the process and communicator that it is
about.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from msgspec import convert

from stepscope.records.nccl import (
    Choice,
    Communicator,
    Family,
    NcclFact,
    NcclLink,
    NcclLog,
    NcclProcess,
    NcclWarning,
    Ring,
    Tree,
)
from stepscope.trace.files import ByteSource, Progress
from stepscope.trace.nccl_log import lines as forms
from stepscope.trace.nccl_log.lines import CHOICE, NET, OWN_KERNEL, split_lines, to_text

_LinkKey = tuple[int, int | None, int, str]
_Chosen = tuple[str | None, int, str, str, int | None, int | None]

_MOST_WARNINGS = 512
_MOST_FACTS = 64
_LATEST = 64  # communicators that a line without a name may be about
# More than any job has. Lines beyond are mixed or damaged, and memory stays bounded.
_MOST_PROCESSES = 1 << 16
_MOST_CHANNELS = 4096
_MOST_SETTINGS = 512
_MOST_VERSIONS = 64


def read_nccl_log(path: str | Path, progress: Progress | None = None) -> NcclLog:
    """Everything this file says. Raises UnreadableInputError when it cannot be opened."""
    source = ByteSource(Path(path), progress)
    reader = _NcclLogReader()
    for number, line, whole in split_lines(source):
        reader.take(number, line, whole)
    return reader.finish(str(path), source.ended_early)


class _NcclLogReader:
    def __init__(self) -> None:
        self._processes: dict[tuple[bytes, bytes], ProcessBuilder] = {}
        self._comms: list[CommunicatorBuilder] = []
        self._choices = ChoiceCounter()
        self._warnings: dict[tuple[int, str, str], list[int]] = {}
        self._warnings_left_out = 0
        self._versions: dict[str, None] = {}
        self._lines = self._foreign = self._unread = self._damaged = 0
        self._handlers: tuple[tuple[re.Pattern[str], Callable[..., None]], ...] = (
            (forms.LINK, self._link),
            (forms.RING, self._ring),
            (forms.TREES, self._trees),
            (forms.ORDER, self._order),
            (forms.COUNTS, self._counts),
            (forms.INIT, self._init),
            (forms.NODES, self._nodes),
            (forms.COLLNET, self._collnet),
            (forms.ENV, self._setting),
            (forms.PLUGIN_ENV, self._setting),
            (forms.VERSION, self._version),
            (forms.WORDS, self._words),
            (forms.ADAPTERS, self._devices),
            (forms.SOCKETS, self._devices),
            (forms.PLAIN, lambda _at, _match: None),
        )

    def take(self, number: int, line: bytes, whole: bool) -> None:
        self._lines += 1
        if b"CCL" not in line:
            self._foreign += 1
            return
        if b"\x1b" in line:
            line = forms.ANSI.sub(b"", line)
        prefixed = forms.split_prefix(line)
        if prefixed is None:
            # With NCCL_DEBUG=VERSION, and in older versions, the version has a line without prefix.
            if match := forms.VERSION.match(to_text(line[: forms.SEARCHED_BYTES]).strip()):
                self._note_version(_version(match))
            elif b"NCCL INFO" in line or b"NCCL WARN" in line:
                self._damaged += 1
            else:
                self._foreign += 1
            return
        host, pid, thread, device, source, level, text = prefixed
        process = self._processes.get((host, pid)) or self._new_process(host, pid, device)
        if process is None:
            self._unread += 1
        elif not whole:  # half a number looks like a number
            self._damaged += 1
        elif level == b"WARN":
            self._warning(process, number, to_text(source), to_text(text).strip())
        elif forms.CALL_MARK in text:
            self._damaged += not self._call(process, number, text)
        elif forms.CHOICE_MARK in text:
            self._damaged += not self._choices.add(text)
        else:
            self._other(At(process, thread, number), to_text(text).rstrip())

    def _new_process(self, host: bytes, pid: bytes, device: bytes) -> ProcessBuilder | None:
        if len(self._processes) == _MOST_PROCESSES:
            return None
        process = ProcessBuilder(len(self._processes), to_text(host), int(pid), int(device))
        self._processes[host, pid] = process
        return process

    def _warning(self, process: ProcessBuilder, number: int, source: str, text: str) -> None:
        key = (process.index, source, text)
        if key in self._warnings:
            self._warnings[key][1] += 1
        elif len(self._warnings) < _MOST_WARNINGS:
            self._warnings[key] = [number, 1]
        else:
            self._warnings_left_out += 1

    def _other(self, at: At, text: str) -> None:
        handled = False
        for pattern, handle in self._handlers:
            if match := pattern.match(text):
                handled = True
                try:
                    handle(at, match)
                except forms.OddLineError:
                    self._damaged += 1
                    return
                break
        facts = at.process.facts
        if forms.FACT.match(text) and (text in facts or len(facts) < _MOST_FACTS):
            facts.setdefault(text, at.line)
        elif not handled:
            self._unread += 1

    def _call(self, process: ProcessBuilder, number: int, text: bytes) -> bool:
        """Return False when the line is damaged."""
        call = forms.CALL.match(text)
        if call is None:
            return False
        address, ranks = to_text(call[7]), int(call[8])
        comm = process.by_address.get(address)
        if comm is None:  # its initialisation is not in this file
            if len(process.comms) == MOST_COMMS:
                return False
            comm = self._new_comm(At(process, b"", number), address)
            comm.nranks = ranks or None
        process.last_used = comm
        if not is_plausible_call(call):
            return False
        comm.calls += 1
        return True

    # Communicators

    def _new_comm(self, at: At, address: str = "") -> CommunicatorBuilder:
        """Raises OddLineError when a process would have more communicators than any has."""
        if len(at.process.comms) == MOST_COMMS:
            raise forms.OddLineError
        comm = CommunicatorBuilder(at.process.index, at.line, address)
        self._comms.append(comm)
        at.process.comms.append(comm)
        if address:
            at.process.by_address[address] = comm
        return comm

    def _init(self, at: At, match: re.Match[str]) -> None:
        address, rank, nranks, device, bus_id, parent, split, color, comm_id, what = match.groups()
        process = at.process
        _check(int(rank) < int(nranks))
        if not what.startswith("Init"):  # destroyed: the address may be used again
            process.by_address.pop(address, None)
            return
        comm = process.by_address.get(address)
        if comm is None or (what == "Init START" and comm.complete):
            comm = claim_unnamed(at, int(rank), address) or self._new_comm(at, address)
        comm.id = comm.id or name_communicator(process, comm_id, parent, split, color)
        comm.rank, comm.nranks, comm.device = int(rank), int(nranks), int(device)
        comm.bus_id, comm.parent = bus_id, parent
        if what == "Init START":
            process.says_start = True
            process.opened[at.thread] = comm
        else:
            comm.complete = True
            process.opened.pop(at.thread, None)

    def _owner(
        self, at: At, address: str | None, own: int | None = None, peer: int | None = None
    ) -> CommunicatorBuilder:
        """The communicator a line is about: the one it names, the one its thread initialises, or
        the latest one whose rank matches."""
        process = at.process
        if address in process.by_address:
            return process.by_address[address]
        if at.thread in process.opened:
            return process.opened[at.thread]
        latest = islice(reversed(process.comms), _LATEST if process.says_start else 0)
        for comm in (process.last_used if process.says_start else None, *latest):
            if comm is not None and comm.address and comm.fits(own, peer):
                comm.guessed += 1
                return comm
        if at.thread not in process.unnamed:
            process.unnamed[at.thread] = self._new_comm(at)
        process.unnamed[at.thread].guessed += 1
        return process.unnamed[at.thread]

    def _nodes(self, at: At, match: re.Match[str]) -> None:
        _check(int(match[2]) < int(match[3]) and int(match[5]) <= int(match[3]))
        comm = at.process.by_address.get(match[1]) or self._new_comm(at, match[1])
        comm.rank, comm.nranks = int(match[2]), int(match[3])
        comm.nodes, comm.local_ranks = int(match[4]), int(match[5])

    def _link(self, at: At, match: re.Match[str]) -> None:
        channel, source, target, direction, transport, address = match.groups()
        own, peer = int(source), int(target)
        if direction == "receive":
            own, peer = peer, own
        comm = self._owner(at, address, own, peer)
        _check(comm.holds(own, peer) and int(channel) < _MOST_CHANNELS)
        comm.add_link((int(source), int(target), own, transport), at.line, int(channel))

    def _collnet(self, at: At, match: re.Match[str]) -> None:
        channel, rank, transport, address = match.groups()
        comm = self._owner(at, address, int(rank))
        _check(comm.holds(int(rank)) and int(channel) < _MOST_CHANNELS)
        comm.add_link((int(rank), None, int(rank), transport), at.line, int(channel))

    def _ring(self, at: At, match: re.Match[str]) -> None:
        channel, previous, after = int(match[1]), int(match[2]), int(match[3])
        comm = self._owner(at, match[4])
        _check(comm.holds(previous, after) and channel < _MOST_CHANNELS)
        comm.rings[channel] = Ring(channel=channel, previous=previous, next=after)

    def _trees(self, at: At, match: re.Match[str]) -> None:
        comm = self._owner(at, match[2])
        for channel, down, up in forms.TREE.findall(match[1]):
            children = tuple(int(child) for child in down.split("/"))
            _check(comm.holds(int(up), *children) and int(channel) < _MOST_CHANNELS)
            comm.trees[int(channel)] = Tree(channel=int(channel), up=int(up), down=children)

    def _order(self, at: At, match: re.Match[str]) -> None:
        comm = self._owner(at, None)
        if comm.counts[0] is None:
            comm.counts = (int(match[1]), *comm.counts[1:])

    def _counts(self, at: At, match: re.Match[str]) -> None:
        counts = tuple(None if count is None else int(count) for count in match.groups())
        self._owner(at, None).counts = counts

    # Processes

    def _setting(self, at: At, match: re.Match[str]) -> None:
        _check(match[1] in at.process.settings or len(at.process.settings) < _MOST_SETTINGS)
        number = match[2].removesuffix(".")  # some end with a full stop
        at.process.settings[match[1]] = number if number.lstrip("-").isdigit() else match[2]

    def _words(self, at: At, match: re.Match[str]) -> None:
        for name, value in match.groupdict().items():
            if value and not value.startswith("internal"):
                at.process.words[name.rstrip("_")] = value

    def _version(self, at: At, match: re.Match[str]) -> None:
        at.process.words["version"] = _version(match)
        self._note_version(_version(match))

    def _note_version(self, version: str) -> None:
        if len(self._versions) < _MOST_VERSIONS:
            self._versions[version] = None

    def _devices(self, at: At, match: re.Match[str]) -> None:
        _check(len(at.process.adapters) + len(at.process.interfaces) < _MOST_SETTINGS)
        if match.lastgroup == "provider":
            at.process.adapters[match["provider"]] = None
            return
        names = at.process.interfaces if match.lastgroup == "sockets" else at.process.adapters
        names |= dict.fromkeys(forms.LISTED.findall(match[1]))

    def finish(self, path: str, ended_early: str | None) -> NcclLog:
        for process in self._processes.values():
            process.settle()
        self._damaged += sum(comm.drop_impossible_ranks() for comm in self._comms)
        comms = [comm for comm in self._comms if comm.address or comm.links]
        return NcclLog(
            path=path,
            processes=tuple(process.record() for process in self._processes.values()),
            communicators=tuple(comm.record() for comm in comms),
            choices=self._choices.choices(),
            warnings=tuple(
                NcclWarning(process=process, source=source, text=text, line=line, count=count)
                for (process, source, text), (line, count) in self._warnings.items()
            ),
            warnings_left_out=self._warnings_left_out,
            versions=tuple(self._versions),
            lines=self._lines,
            foreign_lines=self._foreign,
            unread_lines=self._unread,
            damaged_lines=self._damaged,
            ended_early=ended_early,
        )


def _check(holds: bool) -> None:
    """Numbers that NCCL cannot mean make a line damaged."""
    if not holds:
        raise forms.OddLineError


def _version(match: re.Match[str]) -> str:
    return f"{match[1]} {match[2]}"


# Processes and communicators, built up line by line.

MOST_COMMS = 1024  # of one process
_LONGEST_ID = 256  # each split of a communicator makes it longer
_FAMILIES: tuple[Family, ...] = ("P2P", "SHM", "NET", "COLLNET")


# Fields of the record that the builder has under the same name.
_SAME_NAMES = (
    *("process", "line", "address", "id", "nranks", "device", "bus_id", "parent", "complete"),
    *("nodes", "local_ranks", "calls"),
)


@dataclass
class CommunicatorBuilder:
    process: int
    line: int
    address: str = ""
    id: str = ""
    rank: int | None = None
    nranks: int | None = None
    device: int | None = None
    bus_id: str | None = None
    parent: str | None = None
    complete: bool = False
    nodes: int | None = None
    local_ranks: int | None = None
    counts: tuple[int | None, ...] = (None, None, None, None)
    rings: dict[int, Ring] = field(default_factory=dict)
    trees: dict[int, Tree] = field(default_factory=dict)
    links: dict[_LinkKey, tuple[int, set[int]]] = field(default_factory=dict)  # line, channels
    guessed: int = 0
    calls: int = 0

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


@dataclass
class ProcessBuilder:
    index: int
    host: str
    pid: int
    device: int
    words: dict[str, str] = field(default_factory=dict)  # version, network, plugin, tuner
    interfaces: dict[str, None] = field(default_factory=dict)
    adapters: dict[str, None] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    facts: dict[str, int] = field(default_factory=dict)
    comms: list[CommunicatorBuilder] = field(default_factory=list)  # by their first line
    by_address: dict[str, CommunicatorBuilder] = field(default_factory=dict)
    # Thread -> the communicator it initialises, and lines that name none yet.
    opened: dict[bytes, CommunicatorBuilder] = field(default_factory=dict)
    unnamed: dict[bytes, CommunicatorBuilder] = field(default_factory=dict)
    says_start: bool = False  # before 2.18.3 only the end of an initialisation is logged
    last_used: CommunicatorBuilder | None = None
    splits: Counter[str] = field(default_factory=Counter)

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
            facts=tuple(NcclFact(text=text, line=line) for text, line in self.facts.items()),
            ranks={c.id: c.rank for c in self.comms if c.id and c.rank is not None},
        )


class At(NamedTuple):
    process: ProcessBuilder
    thread: bytes
    line: int


def claim_unnamed(at: At, rank: int, address: str) -> CommunicatorBuilder | None:
    """Return what this thread logged before it named the communicator that it initialises."""
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


# Which algorithm NCCL chose for calls of one kind and size, and which call lines make sense.

_MOST_CHOICES = 1 << 16
_MOST_BYTES = 1 << 50  # of one call
_LARGEST_CHANNEL = (1 << 15) - 1
_MOST_DATATYPES = (1 << 15) - 1
_MOST_CALLS = (1 << 63) - 1
# NCCL's numbers: ncclDataType_t, and the algorithms and protocols that versions before 2.24 print.
_WIDTHS = dict(enumerate((1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)))
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
_KIND_NAMES = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
    "AlltoAll": "all_to_all", "AllToAll": "all_to_all", "AllToAllPivot": "all_to_all",
    "Broadcast": "broadcast", "Reduce": "reduce", "Send": "send", "Recv": "recv",
    "SendRecv": "send_recv", "Gather": "gather", "Scatter": "scatter",
}  # fmt: skip
_COUNT_PER_RANK = frozenset(("all_gather", "reduce_scatter", "all_to_all"))


def is_plausible_call(call: re.Match[bytes]) -> bool:
    """Return False for numbers that no call has: the line is damaged."""
    name, op_count, count, datatype, _, _, _, ranks, _ = call.groups()
    kind = _KIND_NAMES.get(to_text(name), "other")
    width = _WIDTHS.get(int(datatype), 0)
    size_bytes = int(count) * width * (int(ranks) if kind in _COUNT_PER_RANK else 1)
    return (
        int(ranks) > 0
        and size_bytes <= _MOST_BYTES
        and int(datatype) <= _MOST_DATATYPES
        and int(op_count, 16) <= _MOST_CALLS
    )


class ChoiceCounter:
    def __init__(self) -> None:
        self._counts: Counter[_Chosen] = Counter()

    def add(self, text: bytes) -> bool:
        """Return False when the line cannot be read."""
        chosen = _parse(text)
        if chosen is None or max(chosen[-2] or 0, chosen[-1] or 0) > _LARGEST_CHANNEL:
            return False
        if chosen in self._counts or len(self._counts) < _MOST_CHOICES:
            self._counts[chosen] += 1
        return True

    def choices(self) -> tuple[Choice, ...]:
        rows = [(*chosen, count) for chosen, count in self._counts.items()]
        columns = Choice.__struct_fields__
        return convert([dict(zip(columns, row, strict=True)) for row in rows], tuple[Choice, ...])


@lru_cache(maxsize=4096)
def _parse(raw: bytes) -> _Chosen | None:
    text = to_text(raw)
    if match := CHOICE.match(text):
        name, size, algorithm, protocol, first, last = match.groups()
        algorithm, protocol = _name(algorithm, _ALGORITHMS), _name(protocol, _PROTOCOLS)
        ends = (int(first), int(last)) if first else (None, None)
    elif match := OWN_KERNEL.match(text):
        name, algorithm, size, protocol, channels = match.groups()
        algorithm = algorithm.upper()
        ends = (0, int(channels) - 1) if channels else (None, None)
    else:
        return None
    kind = _KIND_NAMES.get(name, "other") if name else None
    return kind, int(size), algorithm, protocol, *ends


def _name(text: str, names: tuple[str, ...]) -> str:
    """Older versions print a number."""
    return dict(zip("0123456789", names, strict=False)).get(text, text.upper())
