"""What NCCL (or RCCL) writes under NCCL_DEBUG=INFO -> who talks to whom, over what, every call.

One pass over the file; what stays is a row of numbers a call and a few records a process. Lines of
several processes may be mixed: each begins with host:pid:tid. Most lines do not say which
communicator they are about: then the thread that initialises one, else the rank, decides.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, deque
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepscope.errors import UnreadableInputError
from stepscope.records.job import KINDS
from stepscope.records.nccl import (
    Choice,
    Communicator,
    Fact,
    Link,
    NcclLog,
    NcclOps,
    NcclProcess,
    NcclWarning,
    Ring,
    Tree,
)
from stepscope.records.trace import ABSENT
from stepscope.trace.files import ByteSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from stepscope.records.nccl import Family
    from stepscope.trace.files import Progress

    _LinkKey = tuple[int, int | None, int, str]  # from, to, own rank, transport
    _Chosen = tuple[str | None, int, str, str, int | None, int | None]  # as in a Choice

_ENDINGS = (".log", ".txt", ".out", ".err", ".log.gz", ".log.zst", ".txt.gz")
_LONGEST_LINE_BYTES = 64 << 10
_SEARCHED_BYTES = 8 << 10  # NCCL itself cuts at 1 KiB
_MOST_WARNINGS = 512
_MOST_FACTS = 64
_MOST_WAITING = 64  # calls of one kind and size that may wait for the line on their algorithm
_MOST_SIZES = 4096

_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(
    rb"([^\s:]{1,255}):(\d+):(\d+) \[(-?\d+)\] "
    rb"(?:(\S+?:\d+)(?: \([^()]*\))? |[\d.]+ \S+ )?NCCL (INFO|WARN|TRACE)(?: (.*))?",
    re.DOTALL,
)
_CALL_MARK = b": opCount "
_CALL = re.compile(
    rb"(\w+): opCount ([0-9a-f]+) sendbuff \S+ recvbuff \S+ count (-?\d+) datatype (\d+) "
    rb"op (-?\d+) root (-?\d+) comm (\S+) \[nranks=(\d+)\] stream (\S+)"
)
_CHOICE_MARK = b" Bytes -> "
_CHOICE = re.compile(
    r"(?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)"
    r"(?: time [\d.]+| channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})"
)
_OWN_KERNEL = re.compile(
    r"(\w+) \[(Symmetric|Copy Engine|Hierarchical CE)\]: (\d+) Bytes -> (?:Kernel )?(.+?)"
    r"(?: nchannels (\d+) nthreads \d+.*)?$"
)
_VERSION = re.compile(r"([NR]CCL) version ?:? ?(\d\S*)")
_RCCL_TAIL = r"(?: comm (\S+) nRanks \d+.*)?$"
_LINK = re.compile(
    r"Channel (\d+)(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[(send|receive)\])? via (.+?)"
    + _RCCL_TAIL
)
_COLLNET = re.compile(r"CollNet (\d+)(?:/\d+)? : (\d+) \[(?:send|receive)\] via (.+?)" + _RCCL_TAIL)
_NET = re.compile(r"(?:NET|COLLNET)/(.+?)/\d+")
_RING = re.compile(r"Ring (\d+) : (-?\d+) -> -?\d+ -> (-?\d+)" + _RCCL_TAIL)
_TREES = re.compile(r"Trees( \[.*?)" + _RCCL_TAIL)
_TREE = re.compile(r"\[(-?\d+)\] ([-\d/]+)->-?\d+->(-?\d+)")
_ORDER = re.compile(r"Channel \d+/(\d+) ?:[\d\s]*$")
_COUNTS = re.compile(
    r"(\d+) coll channels, (?:\d+ collnet channels, )?(?:(\d+) nvls channels, )?"
    r"(\d+) p2p channels, (\d+) p2p channels per peer"
)
_INIT = re.compile(
    r"(?:\[Rank \d+\] )?(?:\w+ )?comm (\S+) rank (\d+) nranks (\d+) cudaDev (\d+)"
    r"(?: nvmlDev \d+)? busId (\w+)"
    r"(?: parent (\S+)(?: (?:split|child)Count (\d+))? color (-?\d+) key -?\d+)?"
    r"(?: commId (\S+))?.*?- (Init START|Init COMPLETE|\w+ COMPLETE)"
)
_NODES = re.compile(r"comm (\S+) rank (\d+) nRanks (\d+) nNodes (\d+) localRanks (\d+)")
_ENV = re.compile(r"([NR]CCL_\w+) set (?:by environment )?to (.*)$")
_PLUGIN_ENV = re.compile(r"NET/\S+ .*?Setting (NCCL_\w+)(?: environment variable)? to (.*)$")
_WORDS = re.compile(
    r"Using network (?P<network>.+)$|Assigned NET plugin (?P<network_>.+) to comm$|"
    r"NET/Plugin ?: Loaded net plugin (?P<plugin>.+?)(?: \(v\d+\))?$|"
    r"TUNER/Plugin: Using (?:tuner plugin )?(?P<tuner>.+?)(?: \(v\d+\))?$|"
    r"Using tuner plugin: '(?P<tuner_>.+)'$"
)
_ADAPTERS = re.compile(
    r"NET/IB ?: Using (?P<adapters>.*?); OOB|NET/OFI Selected [Pp]rovider is (?P<provider>.+)$"
)
_SOCKETS = re.compile(r"(?:NET/Socket|Bootstrap) ?: Using (?P<sockets>.*)$")
_LISTED = re.compile(r"(?:\[\d+\])?([^\s\[\]]+:\S+)")
_FACT = re.compile(
    r"NET/IB ?: No device found|Failed to (?:initialize NET plugin|open libibverbs)|"
    r"P2P is disabled|NVLS multicast support|MNNVL |cudaDriverVersion|=== System|"
    r".*GPU Direct RDMA (?:Dis|En)abled|Connected all rings, use|"
    r"NET/Plugin ?:.*(?:returned|Could not find|No plugin)"
)
_PLAIN = re.compile(r"Connected (?:all|NVLS)|Init timings|Bootstrap timings")  # read, not kept

# NCCL's numbers: ncclDataType_t, and the algorithms and protocols that versions before 2.24 print.
_FAMILIES: tuple[Family, ...] = ("P2P", "SHM", "NET", "COLLNET")
_WIDTHS = dict(enumerate((1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)))
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
_KIND_NAMES = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
    "AlltoAll": "all_to_all", "AllToAll": "all_to_all", "AllToAllPivot": "all_to_all",
    "Broadcast": "broadcast", "Reduce": "reduce", "Send": "send", "Recv": "recv",
    "SendRecv": "send_recv", "Gather": "gather", "Scatter": "scatter",
}  # fmt: skip
_CODE_OF = {name: code for code, name in enumerate(KINDS)}
_TOTAL_KINDS = frozenset(("all_gather", "reduce_scatter", "all_to_all"))  # count is one rank's part
_UNTUNED = frozenset(("send", "recv", "send_recv", "other"))

_ROW = struct.Struct("<bihqqqqiiiq")
_ROW_TYPE = np.dtype(
    [
        ("kind", "<i1"), ("communicator", "<i4"), ("datatype", "<i2"), ("op_count", "<i8"),
        ("count", "<i8"), ("size_bytes", "<i8"), ("reduction", "<i8"), ("root", "<i4"),
        ("ranks", "<i4"), ("stream", "<i4"), ("line", "<i8"),
    ]
)  # fmt: skip
_TUNED = struct.Struct("<qbbhh")
_TUNED_TYPE = np.dtype(
    [
        ("op", "<i8"),
        ("algorithm", "<i1"),
        ("protocol", "<i1"),
        ("first_channel", "<i2"),
        ("last_channel", "<i2"),
    ]
)


def find_nccl_logs(path: str | Path) -> list[Path]:
    """Logs of a run folder or of any folder; a file stands for itself. Empty where there is none.

    In a folder a file counts when its first half megabyte has a line of NCCL's.
    """
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise UnreadableInputError(f"{path} does not exist")
        return [path]
    try:
        files = [*path.iterdir(), *path.glob("rank-*/*")]
    except PermissionError as error:
        raise UnreadableInputError(f"{error.filename}: no permission to read it") from None
    return sorted(file for file in files if _may_be_log(file) and is_nccl_log(file))


def _may_be_log(file: Path) -> bool:
    name = file.name.lower()
    return file.is_file() and (name.startswith(("nccl", "rccl")) or name.endswith(_ENDINGS))


def is_nccl_log(file: Path) -> bool:
    """Whether NCCL's own lines show at the file's beginning."""
    try:
        head = next(iter(ByteSource(file)), b"")
    except UnreadableInputError:
        return False
    lines = (_ANSI.sub(b"", line) for line in head.split(b"\n") if b"CCL" in line)
    return any(_PREFIX.search(line, 0, _SEARCHED_BYTES) for line in lines)


def read_nccl_log(path: str | Path, progress: Progress | None = None) -> NcclLog:
    """Everything this file says. Raises UnreadableInputError when it cannot be opened."""
    source = ByteSource(Path(path), progress)
    reader = _Reader()
    for number, line, whole in _lines(source):
        reader.take(number, line, whole)
    return reader.finish(str(path), source.ended_early)


def _lines(source: Iterable[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    """Number, text and whether its end was seen. A progress bar's carriage returns divide a line
    into parts that share its number."""
    rest = b""
    number = 0
    for piece in source:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            number += 1
            for part in line.split(b"\r") if b"\r" in line else (line,):
                yield number, part, True
        if len(rest) > _LONGEST_LINE_BYTES:
            number += 1
            yield number, rest, False
            rest = b""
    if rest:
        yield number + 1, rest, False


class _Comm:
    """A communicator while its lines come in."""

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

    def fits(self, own: int | None, peer: int | None = None) -> bool:
        """Whether a line about these two ranks can be this one's."""
        ranks_fit = own is None or self.own_rank() in (own, None)
        return ranks_fit and (peer is None or self.nranks is None or peer < self.nranks)

    def own_rank(self) -> int | None:
        return self.rank if self.rank is not None else next((k[2] for k in self.links), None)

    def absorb(self, other: _Comm) -> None:
        """What was read before anybody said whose it is."""
        self.links = other.links | self.links
        self.rings = other.rings | self.rings
        self.trees = other.trees | self.trees
        self.counts = other.counts if self.counts[0] is None else self.counts
        self.guessed += other.guessed
        other.links = {}

    def record(self) -> Communicator:
        channels, nvls, p2p, per_peer = self.counts
        return Communicator(
            process=self.process,
            address=self.address,
            id=self.id,
            rank=self.own_rank(),
            nranks=self.nranks,
            line=self.line,
            complete=self.complete,
            device=self.device,
            bus_id=self.bus_id,
            parent=self.parent,
            nodes=self.nodes,
            local_ranks=self.local_ranks,
            channels=channels,
            nvls_channels=nvls,
            p2p_channels=p2p,
            p2p_channels_per_peer=per_peer,
            rings=tuple(self.rings[channel] for channel in sorted(self.rings)),
            trees=tuple(self.trees[channel] for channel in sorted(self.trees)),
            links=tuple(_link(key, *found) for key, found in self.links.items()),
            guessed_lines=self.guessed,
        )


class _Process:
    """A process while its lines come in."""

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
        self.comms: list[_Comm] = []  # in the order of their first line
        self.by_address: dict[str, _Comm] = {}
        self.opened: dict[bytes, _Comm] = {}  # thread -> the one it initialises
        self.unnamed: dict[bytes, _Comm] = {}  # thread -> lines that nobody claimed yet
        self.says_start = False  # before 2.18.3 only the end of an initialisation is logged
        self.last_used: _Comm | None = None
        self.splits: Counter[str] = Counter()

    def settle(self) -> None:
        """Lines that no communicator claimed go to the latest one they fit."""
        for unnamed in self.unnamed.values():
            named = (comm for comm in reversed(self.comms) if comm.address)
            home = next((comm for comm in named if comm.fits(unnamed.own_rank())), None)
            if home is not None:
                home.absorb(unnamed)

    def record(self) -> NcclProcess:
        return NcclProcess(
            host=self.host,
            pid=self.pid,
            version=self.words.get("version"),
            device=next((c.device for c in self.comms if c.device is not None), self.device),
            bus_id=next((c.bus_id for c in self.comms if c.bus_id), None),
            network=self.words.get("network"),
            plugin=self.words.get("plugin"),
            tuner=self.words.get("tuner"),
            interfaces=tuple(self.interfaces),
            adapters=tuple(self.adapters),
            settings=self.settings,
            facts=tuple(Fact(text=text, line=line) for text, line in self.facts.items()),
            ranks={c.id: c.rank for c in self.comms if c.id and c.rank is not None},
        )


class _At(NamedTuple):
    """Where a line stands."""

    process: _Process
    thread: bytes
    line: int


class _Reader:
    """Takes lines, keeps what they say."""

    def __init__(self) -> None:
        self._processes: dict[tuple[bytes, bytes], _Process] = {}
        self._comms: list[_Comm] = []
        self._place: dict[_Comm, int] = {}
        self._calls = _Calls()
        self._warnings: dict[tuple[int, str, str], list[int]] = {}
        self._warnings_left_out = 0
        self._versions: dict[str, None] = {}
        self._lines = self._foreign = self._unread = self._damaged = 0
        self._handlers: tuple[tuple[re.Pattern[str], Callable[..., None]], ...] = (
            (_LINK, self._link),
            (_RING, self._ring),
            (_TREES, self._trees),
            (_ORDER, self._order),
            (_COUNTS, self._counts),
            (_INIT, self._init),
            (_NODES, self._nodes),
            (_COLLNET, self._collnet),
            (_ENV, self._setting),
            (_PLUGIN_ENV, self._setting),
            (_VERSION, self._version),
            (_WORDS, self._words),
            (_ADAPTERS, self._devices),
            (_SOCKETS, self._devices),
            (_PLAIN, self._nothing),
        )

    def take(self, number: int, line: bytes, whole: bool) -> None:
        self._lines += 1
        if b"CCL" not in line:
            self._foreign += 1
            return
        if b"\x1b" in line:
            line = _ANSI.sub(b"", line)
        found = _PREFIX.search(line, 0, _SEARCHED_BYTES)
        if found is None:
            self._without_prefix(line)
            return
        host, pid, thread, device, source, level, text = found.groups(b"")
        process = self._processes.get((host, pid)) or self._new_process(host, pid, device)
        if not whole:  # half a number looks like a number
            self._damaged += 1
        elif level == b"WARN":
            self._warning(process, number, _text(source), _text(text).strip())
        elif _CALL_MARK in text:
            self._damaged += not self._call(process, number, text)
        elif _CHOICE_MARK in text:
            self._damaged += not self._calls.choose(process.index, text)
        else:
            self._other(_At(process, thread, number), _text(text).rstrip())

    def _new_process(self, host: bytes, pid: bytes, device: bytes) -> _Process:
        made = _Process(len(self._processes), _text(host), int(pid), int(device))
        self._processes[host, pid] = made
        return made

    def _without_prefix(self, line: bytes) -> None:
        """At NCCL_DEBUG=VERSION, and in older ones, the version stands alone."""
        if found := _VERSION.match(_text(line[:_SEARCHED_BYTES]).strip()):
            self._versions[_version(found)] = None
        elif b"NCCL INFO" in line or b"NCCL WARN" in line:
            self._damaged += 1
        else:
            self._foreign += 1

    def _warning(self, process: _Process, number: int, source: str, text: str) -> None:
        key = (process.index, source, text)
        if key in self._warnings:
            self._warnings[key][1] += 1
        elif len(self._warnings) < _MOST_WARNINGS:
            self._warnings[key] = [number, 1]
        else:
            self._warnings_left_out += 1

    def _other(self, at: _At, text: str) -> None:
        handled = False
        for pattern, handle in self._handlers:
            if found := pattern.match(text):
                handle(at, found)
                handled = True
                break
        facts = at.process.facts
        if _FACT.match(text) and (text in facts or len(facts) < _MOST_FACTS):
            facts.setdefault(text, at.line)
        elif not handled:
            self._unread += 1

    def _call(self, process: _Process, number: int, text: bytes) -> bool:
        found = _CALL.match(text)
        if found is None:
            return False
        address, ranks = _text(found[7]), int(found[8])
        comm = process.by_address.get(address)
        if comm is None:  # its beginning is not in this file
            comm = self._new_comm(_At(process, b"", number), address)
            comm.nranks = ranks
        process.last_used = comm
        says_algorithm = comm.rank in (0, None)
        place = self._place[comm]
        return self._calls.add(process.index, place, says_algorithm, ranks, number, found)

    # Communicators

    def _new_comm(self, at: _At, address: str = "") -> _Comm:
        comm = _Comm(at.process.index, at.line, address)
        self._place[comm] = len(self._comms)
        self._comms.append(comm)
        at.process.comms.append(comm)
        if address:
            at.process.by_address[address] = comm
        return comm

    def _init(self, at: _At, found: re.Match[str]) -> None:
        address, rank, nranks, device, bus_id, parent, split, color, comm_id, what = found.groups()
        process = at.process
        if not what.startswith("Init"):  # destroyed: the address may serve another one later
            process.by_address.pop(address, None)
            return
        comm = process.by_address.get(address)
        if comm is None or (what == "Init START" and comm.complete):
            comm = _claimed(at, int(rank), address) or self._new_comm(at, address)
        comm.id = comm.id or _comm_id(process, comm_id, parent, split, color)
        comm.rank, comm.nranks, comm.device = int(rank), int(nranks), int(device)
        comm.bus_id, comm.parent = bus_id, parent
        if what == "Init START":
            process.says_start = True
            process.opened[at.thread] = comm
        else:
            comm.complete = True
            process.opened.pop(at.thread, None)

    def _owner(
        self, at: _At, address: str | None, own: int | None = None, peer: int | None = None
    ) -> _Comm:
        """Whose line it is: it says so, its thread initialises one, or ranks and recency decide."""
        process = at.process
        if address in process.by_address:
            return process.by_address[address]
        if at.thread in process.opened:
            return process.opened[at.thread]
        likely = [process.last_used, *reversed(process.comms)] if process.says_start else []
        for comm in likely:
            if comm is not None and comm.address and comm.fits(own, peer):
                comm.guessed += 1
                return comm
        if at.thread not in process.unnamed:
            process.unnamed[at.thread] = self._new_comm(at)
        process.unnamed[at.thread].guessed += 1
        return process.unnamed[at.thread]

    def _nodes(self, at: _At, found: re.Match[str]) -> None:
        comm = at.process.by_address.get(found[1]) or self._new_comm(at, found[1])
        comm.rank, comm.nranks = int(found[2]), int(found[3])
        comm.nodes, comm.local_ranks = int(found[4]), int(found[5])

    def _link(self, at: _At, found: re.Match[str]) -> None:
        channel, source, target, direction, transport, address = found.groups()
        own, peer = int(source), int(target)
        if direction == "receive":
            own, peer = peer, own
        links = self._owner(at, address, own, peer).links
        key = (int(source), int(target), own, transport)
        links.setdefault(key, (at.line, set()))[1].add(int(channel))

    def _collnet(self, at: _At, found: re.Match[str]) -> None:
        channel, rank, transport, address = found.groups()
        links = self._owner(at, address, int(rank)).links
        key = (int(rank), None, int(rank), transport)
        links.setdefault(key, (at.line, set()))[1].add(int(channel))

    def _ring(self, at: _At, found: re.Match[str]) -> None:
        channel, previous, after = int(found[1]), int(found[2]), int(found[3])
        rings = self._owner(at, found[4]).rings
        rings[channel] = Ring(channel=channel, previous=previous, next=after)

    def _trees(self, at: _At, found: re.Match[str]) -> None:
        trees = self._owner(at, found[2]).trees
        for channel, down, up in _TREE.findall(found[1]):
            children = tuple(int(child) for child in down.split("/"))
            trees[int(channel)] = Tree(channel=int(channel), up=int(up), down=children)

    def _order(self, at: _At, found: re.Match[str]) -> None:
        comm = self._owner(at, None)
        if comm.counts[0] is None:
            comm.counts = (int(found[1]), *comm.counts[1:])

    def _counts(self, at: _At, found: re.Match[str]) -> None:
        counts = tuple(None if each is None else int(each) for each in found.groups())
        self._owner(at, None).counts = counts

    # Processes

    def _setting(self, at: _At, found: re.Match[str]) -> None:
        number = found[2].removesuffix(".")  # some end as a sentence, some do not
        at.process.settings[found[1]] = number if number.lstrip("-").isdigit() else found[2]

    def _words(self, at: _At, found: re.Match[str]) -> None:
        for name, value in found.groupdict().items():
            if value and not value.startswith("internal"):
                at.process.words[name.rstrip("_")] = value

    def _version(self, at: _At, found: re.Match[str]) -> None:
        at.process.words["version"] = _version(found)
        self._versions[_version(found)] = None

    def _devices(self, at: _At, found: re.Match[str]) -> None:
        if found.lastgroup == "provider":
            at.process.adapters[found["provider"]] = None
            return
        kept = at.process.interfaces if found.lastgroup == "sockets" else at.process.adapters
        kept |= dict.fromkeys(_LISTED.findall(found[1]))

    def _nothing(self, at: _At, found: re.Match[str]) -> None:
        pass

    def finish(self, path: str, ended_early: str | None) -> NcclLog:
        for process in self._processes.values():
            process.settle()
        kept = [comm for comm in self._comms if comm.address or comm.links]
        place = {comm: index for index, comm in enumerate(kept)}
        moved = np.array([place.get(comm, ABSENT) for comm in self._comms], dtype=np.int32)
        return NcclLog(
            path=path,
            processes=tuple(process.record() for process in self._processes.values()),
            communicators=tuple(comm.record() for comm in kept),
            ops=self._calls.columns(moved),
            choices=self._calls.choices(),
            choices_unmatched=self._calls.unmatched,
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


class _Calls:
    """Every call as a row of numbers, and the algorithm that a later line names for it."""

    def __init__(self) -> None:
        self.unmatched = 0
        self._count = 0
        self._rows = bytearray()
        self._tuned = bytearray()
        self._algorithms: dict[str, int] = {}
        self._protocols: dict[str, int] = {}
        self._streams: dict[str, int] = {}
        self._waiting: dict[tuple[int, str, int], deque[int]] = {}
        self._chosen: Counter[_Chosen] = Counter()

    def add(
        self, process: int, comm: int, says_algorithm: bool, ranks: int, line: int,
        found: re.Match[bytes],
    ) -> bool:  # fmt: skip
        """False when the line cannot be read, as for `choose`."""
        name, op_count, count, datatype, op, root, _, _, stream = found.groups()
        kind = _KIND_NAMES.get(_text(name), "other")
        width = _WIDTHS.get(int(datatype))
        part_bytes = int(count) * width if width else ABSENT
        size_bytes = part_bytes * ranks if width and kind in _TOTAL_KINDS else part_bytes
        try:
            self._rows += _ROW.pack(
                _CODE_OF[kind], comm, int(datatype), int(op_count, 16), int(count), size_bytes,
                int(op), int(root), ranks, _code(self._streams, _text(stream)), line,
            )  # fmt: skip
        except struct.error:  # numbers that NCCL cannot have meant
            return False
        if says_algorithm and kind not in _UNTUNED:
            for size in {part_bytes, size_bytes}:  # which one is printed depends on the version
                self._wait((process, kind, size))
        self._count += 1
        return True

    def _wait(self, key: tuple[int, str, int]) -> None:
        if key not in self._waiting:
            if len(self._waiting) > _MOST_SIZES:
                self._waiting.clear()
            self._waiting[key] = deque(maxlen=_MOST_WAITING)
        self._waiting[key].append(self._count)

    def choose(self, process: int, text: bytes) -> bool:
        chosen = _chosen(text)
        if chosen is None:
            return False
        kind, size, algorithm, protocol, *ends = chosen
        op = self._latest(process, kind, size)
        codes = _code(self._algorithms, algorithm), _code(self._protocols, protocol)
        ends = [ABSENT if end is None else end for end in ends]
        try:
            row = _TUNED.pack(ABSENT if op is None else op, *codes, *ends)
        except struct.error:
            return False
        self._chosen[chosen] += 1
        if op is None:
            self.unmatched += 1
        else:
            self._tuned += row
        return True

    def _latest(self, process: int, kind: str | None, size: int) -> int | None:
        """The latest such call: an earlier one of the same kind and size was answered, or never is.

        Calls of a group are answered together and not in their order, but equal ones equally.
        """
        queues = (self._waiting.get((process, k, size)) for k in ([kind] if kind else KINDS))
        latest = max((queue for queue in queues if queue), key=lambda q: q[-1], default=None)
        return latest.pop() if latest else None

    def choices(self) -> tuple[Choice, ...]:
        return tuple(
            Choice(
                kind=kind,
                size_bytes=size,
                algorithm=algorithm,
                protocol=protocol,
                first_channel=first,
                last_channel=last,
                count=count,
            )
            for (kind, size, algorithm, protocol, first, last), count in self._chosen.items()
        )

    def columns(self, communicators: NDArray[np.int32]) -> NcclOps:
        rows = np.frombuffer(self._rows, dtype=_ROW_TYPE)
        tuned = np.frombuffer(self._tuned, dtype=_TUNED_TYPE)
        columns = {name: np.ascontiguousarray(rows[name]) for name in _ROW_TYPE.names or ()}
        if len(rows):
            columns["communicator"] = communicators[columns["communicator"]]
        for name in ("algorithm", "protocol", "first_channel", "last_channel"):
            columns[name] = np.full(len(rows), ABSENT, dtype=_TUNED_TYPE[name])
            columns[name][tuned["op"]] = tuned[name]
        return NcclOps(
            algorithms=tuple(self._algorithms),
            protocols=tuple(self._protocols),
            streams=tuple(self._streams),
            **columns,
        )


@lru_cache(maxsize=4096)
def _chosen(raw: bytes) -> _Chosen | None:
    text = _text(raw)
    if found := _CHOICE.match(text):
        name, size, algorithm, protocol, first, last = found.groups()
        algorithm, protocol = _named(algorithm, _ALGORITHMS), _named(protocol, _PROTOCOLS)
        ends = (int(first), int(last)) if first else (None, None)
    elif found := _OWN_KERNEL.match(text):
        name, algorithm, size, protocol, channels = found.groups()
        algorithm = algorithm.upper()
        ends = (0, int(channels) - 1) if channels else (None, None)
    else:
        return None
    kind = _KIND_NAMES.get(name, "other") if name else None
    return kind, int(size), algorithm, protocol, *ends


def _claimed(at: _At, rank: int, address: str) -> _Comm | None:
    """What this thread wrote before it said which communicator it makes."""
    process = at.process
    unnamed = process.unnamed.get(at.thread)
    if process.says_start or unnamed is None or not unnamed.fits(rank):
        return None
    del process.unnamed[at.thread]
    unnamed.address = address
    process.by_address[address] = unnamed
    return unnamed


def _link(key: _LinkKey, line: int, channels: set[int]) -> Link:
    source, target, own, transport = key
    net = _NET.match(transport)
    return Link(
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
    return "SHM" if "shared memory" in transport else "other"  # so until 2.12


def _comm_id(
    process: _Process, comm_id: str | None, parent: str | None, split: str | None, color: str | None
) -> str:
    """The same text on every rank. Since 2.23 a split names its parent instead of an id."""
    if comm_id or not parent:
        return comm_id or ""
    count = split or str(process.splits[parent])
    process.splits[parent] += 1
    origin = process.by_address.get(parent)
    return f"{origin.id}/{count}.{color}" if origin and origin.id else ""


def _version(found: re.Match[str]) -> str:
    return f"{found[1]} {found[2]}"


def _named(text: str, names: tuple[str, ...]) -> str:
    return names[int(text)] if text.isdigit() and int(text) < len(names) else text.upper()


def _code(table: dict[str, int], name: str) -> int:
    return table.setdefault(name, len(table))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
