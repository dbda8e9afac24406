"""Write `explain --perfetto FILE`: the trace's own text unchanged, with our tracks at the
front of its list.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from stepscope.errors import NotCapturedError, UsageError
from stepscope.explain.device_path import DevicePiece, device_path
from stepscope.records.explanation import GAP_CAUSES, Explanation, Gaps, RankExplanation
from stepscope.records.trace import HostKind, Trace
from stepscope.step import intervals
from stepscope.text.figures import milliseconds, percent
from stepscope.trace.formats.kineto import EventList
from stepscope.trace.links import nearest
from stepscope.ui.words import PARTS, one_line

if TYPE_CHECKING:
    from stepscope.explain.explain_job import JobTraces
    from stepscope.explain.rank_analysis import RankAnalysis

    Stretches = tuple[list[int], list[int], list[str]]

_FORMAT = "kineto"
_BLOCK_BYTES = 1 << 20
_GZIP_LEVEL = 1


def write_perfetto(
    traces: JobTraces, explanation: Explanation, target: Path, *, ranks: Sequence[RankExplanation]
) -> list[Path]:
    """One file per rank: `target` itself for one rank, else with the rank in its name."""
    stem, dot, suffix = target.name.partition(".")
    targets = [target]
    if len(ranks) > 1:  # trace.json.gz -> trace-rank-3.json.gz
        names = [f"{stem}-{rank.called.replace(' ', '-')}{dot}{suffix}" for rank in ranks]
        targets = [target.with_name(name) for name in names]
    written: list[Path] = []
    for rank, path in zip(ranks, targets, strict=True):
        visit = partial(_write_rank, explanation=explanation, target=path)
        written += traces.visit_here(rank.path, visit).results
    if not written:
        raise NotCapturedError("--perfetto: no rank has a trace of PyTorch's profiler")
    return written


def _write_rank(
    analysis: RankAnalysis, rank: RankExplanation, *, explanation: Explanation, target: Path
) -> Path:
    trace = analysis.trace
    if trace.format != _FORMAT:
        raise UsageError(
            f"--perfetto needs a trace that PyTorch's profiler wrote: {trace.path} is of "
            f"{trace.format}"
        )
    if target.exists() and target.samefile(trace.path):
        raise UsageError(f"--perfetto {target} is the trace itself: name another file")
    source = EventList(Path(trace.path))
    notes = {note.id for note in trace.quality}
    base_ns = 0 if "base-ignored" in notes else source.base_ns
    events = track_events(make_tracks(analysis, rank, explanation), trace, base_ns)
    with _writing(target) as file:
        for block in _blocks(source.with_events(events, ends_early="truncated" in notes)):
            file.write(block)
    return target


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Many small events are written at once."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _BLOCK_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[IO[bytes]]:
    """Whole or not at all; compressed if its name ends with .gz."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with contextlib.ExitStack() as stack:
            file: IO[bytes] = stack.enter_context(unfinished.open("wb"))
            if target.suffix == ".gz":
                from isal import igzip

                file = stack.enter_context(
                    igzip.IGzipFile(mode="wb", fileobj=file, compresslevel=_GZIP_LEVEL, mtime=0)
                )
            yield file
        unfinished.replace(target)
    except OSError as error:
        raise UsageError(f"--perfetto {target} could not be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


# What we know about one rank, as tracks above its own.

_WORK_PARTS = ("compute", "exposed_comm", "exposed_memory")
_GAP_PARTS = {"launch": "idle_launch", "other": "idle_other"}  # the others have their own names
_PIECE_WORDS = {"work": "own work", "input": "waits for data", "transfer": "transfer"}
# What of the budget a finding is about: its instant stands where the longest such stretch begins.
_SHOWN_AT = {
    "data-loading": "data_loading",
    "blocking-syncs": "sync",
    "dispatch-bound": "operators",
    "python-overhead": "python",
    "profiler-overhead": "profiler",
    "launch-bound": "idle_launch",
    "exposed-communication": "exposed_comm",
    "exposed-copies": "exposed_memory",
}


def make_tracks(
    analysis: RankAnalysis, rank: RankExplanation, explanation: Explanation
) -> list[Track]:
    """Tracks without anything to show are left out."""
    stretches, path = _divide(analysis, rank), PathTrack(analysis)
    has_gaps = rank.gaps is not None and len(rank.gaps.start_ns) > 0
    job_path = list(_job_path(explanation, rank))
    tracks = {
        "budget by cycle": (True, _cycles(rank, stretches)),
        "budget": (bool(stretches[0]), _slices_of(stretches)),
        "idle causes": (has_gaps, _idle(analysis, rank)),
        "critical path": (bool(path), path.slices()),
        "critical path of the job": (bool(job_path), iter(job_path)),
        "findings": (True, _findings(explanation, rank, stretches)),
    }
    return [Track(name, slices) for name, (shown, slices) in tracks.items() if shown]


def _divide(analysis: RankAnalysis, rank: RankExplanation) -> Stretches:
    """The time line cut into parts of the budget: starts, ends, ids. Neighbours differ."""
    work = analysis.work
    starts, lengths, (compute, comm, memory) = intervals.sweep(
        (work.compute, work.comm, work.memory)
    )
    part = np.where(compute, 0, np.where(comm, 1, np.where(memory, 2, -1)))
    busy = part >= 0
    names = list(_WORK_PARTS) + [_GAP_PARTS.get(cause, cause) for cause in GAP_CAUSES]
    all_starts, all_ends = starts[busy], (starts + lengths)[busy]
    code = part[busy]
    if rank.gaps is not None:
        all_starts = np.append(all_starts, rank.gaps.start_ns)
        all_ends = np.append(all_ends, rank.gaps.end_ns)
        code = np.append(code, rank.gaps.cause.astype(np.int64) + len(_WORK_PARTS))
    return _joined(all_starts, all_ends, code, names)


def _joined(starts: Any, ends: Any, code: Any, names: Sequence[str]) -> Stretches:
    """In order of time; stretches of one part that touch become one."""
    order = np.argsort(starts, kind="stable")
    starts, ends, code = starts[order], ends[order], code[order]
    keep = ends > starts
    starts, ends, code = starts[keep], ends[keep], code[keep]
    opens = np.ones(len(starts), np.bool_)
    opens[1:] = (code[1:] != code[:-1]) | (starts[1:] != ends[:-1])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(starts)) - 1
    if not len(starts):
        return [], [], []
    ids = [names[one] for one in code[first].tolist()]
    return starts[first].tolist(), ends[last].tolist(), ids


def _label(part: str) -> str:
    return PARTS[part][0] if part in PARTS else part


def _slices_of(stretches: Stretches) -> Iterator[Slice]:
    for start, end, part in zip(*stretches, strict=True):
        yield Slice(_label(part), start, end, {})


def _cycles(rank: RankExplanation, stretches: Stretches) -> Iterator[Slice]:
    """Each cycle of the budget with what it consists of."""
    steps = rank.steps
    edges = list(accumulate(steps.cycles_ns, initial=steps.window_start_ns))
    if len(edges) < 2:
        edges = [steps.window_start_ns, steps.window_end_ns]
    for number, (start, end) in enumerate(pairwise(edges)):
        place = steps.first_cycle + number
        known = place < len(steps.steps) and bool(steps.cycles_ns)
        name = steps.steps[place].name if known else "steps"
        if end > start:
            yield Slice(name, start, end, _parts_within(stretches, start, end))


def _parts_within(stretches: Stretches, low: int, high: int) -> dict[str, str]:
    """What each part takes of this time, the longest first."""
    starts, ends = np.array(stretches[0]), np.array(stretches[1])
    if not len(starts):
        return {}
    first, last = np.searchsorted(ends, low, side="right"), np.searchsorted(starts, high)
    sizes: dict[str, int] = {}
    inside = np.minimum(ends[first:last], high) - np.maximum(starts[first:last], low)
    for part, size in zip(stretches[2][first:last], inside.tolist(), strict=True):
        sizes[part] = sizes.get(part, 0) + size
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return {
        _label(part): f"{milliseconds(size / 1e6)} ({percent(size / (high - low))})"
        for part, size in ordered
    }


def _idle(analysis: RankAnalysis, rank: RankExplanation) -> Iterator[Slice]:
    """Every gap by its cause, with the Python function that ran on the host."""
    gaps: Gaps | None = rank.gaps
    if gaps is None:
        return
    names, strings = analysis.trace.host.name, analysis.trace.strings
    columns = (gaps.start_ns.tolist(), gaps.end_ns.tolist(), gaps.cause.tolist())
    for start, end, cause, frame in zip(*columns, gaps.frame.tolist(), strict=True):
        if end > start:
            args = {"in": strings[names[frame]]} if frame >= 0 else {}
            name = GAP_CAUSES[cause]
            yield Slice(_label(_GAP_PARTS.get(name, name)), start, end, args)


def _job_path(explanation: Explanation, rank: RankExplanation) -> Iterator[Slice]:
    """The pieces of the job's critical path that are this rank's, on its own clock."""
    job = explanation.job
    if job is None or job.path is None or rank.rank is None:
        return
    for piece in job.path.pieces:
        if piece.rank == rank.rank:
            times = np.array([piece.start_ns, piece.end_ns], np.int64)
            # Clocks differ by far less than it takes the shift itself to change.
            start, end = (2 * times - job.clock.shift_ns(rank.rank, times)).tolist()
            yield Slice(_PIECE_WORDS[piece.kind], start, end, {"what": piece.label})


def _findings(
    explanation: Explanation, rank: RankExplanation, stretches: Stretches
) -> Iterator[Slice]:
    """The verdict and every finding about this rank or the job, where it shows most."""
    begin = rank.steps.window_start_ns
    yield Slice(
        explanation.verdict, begin, None, _present(why=explanation.why, next=explanation.next)
    )
    mine = [one for one in explanation.findings if one.rank in (None, rank.rank)]
    known = {one.id for one in mine}
    for finding in [*mine, *(one for one in rank.findings if one.id not in known)]:
        start = _longest(stretches, _SHOWN_AT.get(finding.id), begin, rank.steps.window_end_ns)
        name = f"{finding.title}: {percent(finding.share)}" if finding.share else finding.title
        args = _present(
            summary=finding.summary,
            severity=finding.severity,
            evidence="; ".join(finding.evidence),
            where="; ".join(f"{at.file}:{at.line} {at.function}" for at in finding.where),
            remedies="; ".join(remedy.summary for remedy in finding.remedies),
        )
        yield Slice(name, start, None, args)


def _longest(stretches: Stretches, part: str | None, begin: int, end: int) -> int:
    """Where the part's longest stretch within the steps begins; else where the steps begin."""
    sizes = [
        (high - low, low)
        for low, high, name in zip(*stretches, strict=True)
        if name == part and begin <= low < end
    ]
    return max(sizes, default=(0, begin))[1]


def _present(**args: str) -> dict[str, Any]:
    return {name: text for name, text in args.items() if text}


# The device's critical path as slices: kernels, and what the host did where it was late.

_WORDS = {"queue": "queued on the device", "launch": "launch", "sync": "CPU returns from a wait"}
BETWEEN_OPERATORS = "CPU: Python between operators"


class PathTrack:
    """One rank's path; empty where the CPU is the device."""

    def __init__(self, analysis: RankAnalysis) -> None:
        self._trace, self._work = analysis.trace, analysis.work
        self._pieces = device_path(analysis)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def slices(self) -> Iterator[Slice]:
        for piece in self._pieces:
            if piece.kind == "host":
                yield from self._host(piece)
            else:
                yield self._slice(piece)

    def _slice(self, piece: DevicePiece) -> Slice:
        trace = self._trace
        if piece.kind == "device":
            name = trace.strings[trace.device.name[piece.row]]
            return Slice(name, piece.start_ns, piece.end_ns, {})
        args = {"call": trace.strings[trace.host.name[piece.row]]} if piece.row >= 0 else {}
        return Slice(_WORDS[piece.kind], piece.start_ns, piece.end_ns, args)

    def _host(self, piece: DevicePiece) -> Iterator[Slice]:
        """The host's time up to a launch: operators, and Python between them."""
        starts, ends, rows = self._operators
        first = int(np.searchsorted(ends, piece.start_ns, side="right"))
        last = int(np.searchsorted(starts, piece.end_ns, side="left"))
        time = piece.start_ns
        for place in range(first, last):
            begins = max(time, int(starts[place]))
            stops = min(int(ends[place]), piece.end_ns)
            if begins > time:
                yield Slice(BETWEEN_OPERATORS, time, begins, {})
            name = self._trace.strings[self._trace.host.name[rows[place]]]
            if stops > begins:
                yield Slice(f"host: {name}", begins, stops, {})
            time = max(time, stops)
        if piece.end_ns > time:
            yield Slice(BETWEEN_OPERATORS, time, piece.end_ns, {})

    @cached_property
    def _operators(
        self,
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
        """Outermost operators of the threads that feed the device, one after the other: where two
        threads overlap, the earlier one counts to its end."""
        host = self._trace.host
        operator = (host.kind == HostKind.OPERATOR) & self._work.feeds(host.thread)
        above = np.where(host.parent >= 0, nearest(host, operator)[np.maximum(host.parent, 0)], -1)
        rows = np.flatnonzero(operator & (above < 0))
        rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
        ends = np.maximum.accumulate(host.start_ns[rows] + host.dur_ns[rows])
        starts = np.maximum(host.start_ns[rows], np.append(host.start_ns[rows[:1]], ends[:-1]))
        keep = ends > starts
        return starts[keep], ends[keep], rows[keep]


# Tracks as events of the Chrome JSON format: slices, instants and the names of tracks.
#
# Times are written as exact decimals of microseconds, counted from the trace's own base.

PROCESS_NAME = "stepscope"
CATEGORY = "stepscope"
_FIRST_PID = 900_000_001  # above any process id that Linux gives
_ABOVE_ALL = -1_000_000  # Perfetto sorts processes by this number


class Slice(NamedTuple):
    """A stretch of a track; on one track slices do not overlap. Without an end, an instant."""

    name: str
    start_ns: int
    end_ns: int | None
    args: dict[str, Any]


class Track(NamedTuple):
    name: str
    slices: Iterator[Slice]  # made while they are written


def track_events(tracks: Iterable[Track], trace: Trace, base_ns: int) -> Iterator[bytes]:
    """Events in a process of our own, each a JSON object."""
    pid = _free_pid(trace)
    yield _named("process_name", pid, 0, {"name": PROCESS_NAME})
    yield _named("process_sort_index", pid, 0, {"sort_index": _ABOVE_ALL})
    for number, track in enumerate(tracks, 1):
        yield _named("thread_name", pid, number, {"name": track.name})
        yield _named("thread_sort_index", pid, number, {"sort_index": number})
        for one in track.slices:
            yield msgspec.json.encode(_event(one, pid, number, base_ns))


def _event(one: Slice, pid: int, tid: int, base_ns: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "cat": CATEGORY,
        "name": one_line(one.name),
        "pid": pid,
        "tid": tid,
        "ts": _microseconds(one.start_ns - base_ns),
    }
    if one.end_ns is None:
        event |= {"ph": "i", "s": "t"}
    else:
        event["dur"] = _microseconds(one.end_ns - one.start_ns)
    return {**event, "args": one.args} if one.args else event


def _named(kind: str, pid: int, tid: int, args: dict[str, Any]) -> bytes:
    event = {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
    return msgspec.json.encode(event)


def _microseconds(ns: int) -> msgspec.Raw:
    whole, rest = divmod(abs(ns), 1000)
    return msgspec.Raw(f"{'-' if ns < 0 else ''}{whole}.{rest:03d}".encode())


def _free_pid(trace: Trace) -> int:
    """A process id that no event of the trace has."""
    taken = {thread.pid for thread in trace.threads}
    pid = _FIRST_PID
    while str(pid) in taken:
        pid += 1
    return pid
