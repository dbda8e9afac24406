"""Reads a log in one pass: each line goes to the process and communicator it is about."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.records.nccl import NcclLog, NcclWarning, Ring, Tree
from stepscope.trace.files import ByteSource
from stepscope.trace.nccl_log import lines as forms
from stepscope.trace.nccl_log.choices import ChoiceCounter, is_plausible_call
from stepscope.trace.nccl_log.lines import split_lines, to_text
from stepscope.trace.nccl_log.processes import (
    MOST_COMMS,
    At,
    CommunicatorBuilder,
    ProcessBuilder,
    claim_unnamed,
    name_communicator,
)

if TYPE_CHECKING:
    import re
    from collections.abc import Callable

    from stepscope.trace.files import Progress

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
            self._without_prefix(line)
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

    def _without_prefix(self, line: bytes) -> None:
        """With NCCL_DEBUG=VERSION, and in older versions, the version has a line without prefix."""
        if match := forms.VERSION.match(to_text(line[: forms.SEARCHED_BYTES]).strip()):
            self._note_version(_version(match))
        elif b"NCCL INFO" in line or b"NCCL WARN" in line:
            self._damaged += 1
        else:
            self._foreign += 1

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
        """False when the line is damaged."""
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
