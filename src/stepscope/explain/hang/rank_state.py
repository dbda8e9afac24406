"""What each rank does while no step ends, by stacks, threads and the system; who waits for whom."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from stepscope.records.hang import (
    HangCollective,
    HangFrame,
    HangGroup,
    HangMoved,
    HangProcess,
    HangRank,
    HangRecord,
    HangThread,
)
from stepscope.records.source_lines import Place
from stepscope.text.figures import byte_rate
from stepscope.text.words import counted

_RUNS = 0.5  # of the time between two looks
_MOVES_BYTES_S, _MOVES_FAULTS_S = 256 << 10, 20
STOPPED, TRACED = ("T", "t"), "t"
DEAD = ("Z", "X", "x")
_LONG_WORDS = {
    "evaluation": "it is evaluating",
    "checkpoint": "it is saving or loading a checkpoint",
    "compile": "it is compiling",
    "between_epochs": "it is between two epochs",
    "start_up": "it has not ended its first step",
    "after_training": "it has left the training loop",
    "capture": "it writes what stepscope recorded",
    "import": "it is importing modules",
}
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd", "/ipdb/", "/pudb/")
_WAITS_FOR_CHILD = ("/subprocess.py", "/multiprocessing/")
_LONG_TIMES = 20  # limits
_LOADER = "torch/utils/data/"
_DISTRIBUTED = ("torch/distributed/", "torch/nn/parallel/")
_BACKWARD = ("torch/autograd/", "torch/_tensor.py")
_PYTHON_LOCKS = ("/threading.py", "/queue.py", "/concurrent/futures/")
_LOCK_TEXT = re.compile(
    r"\.acquire\(|^(async )?with\b.*(lock|mutex|sem|cond)|^with\b [\w.]+:", re.I
)
_WAIT_TEXT = re.compile(r"\.(wait|result)\(")
_DEVICE_TEXT = re.compile(r"synchronize\(|\.(item|cpu|tolist|numpy|nonzero)\(|\.to\(")
INIT = "init_process_group"
_SLEEPS = ("nanosleep", "clock_nanosleep")
_KINDS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"),
    *("reduce", "gather", "scatter", "send", "recv", "batch_isend_irecv"),
)


class RankDoing(NamedTuple):
    """One rank's state; `waits_for` is the collective in which it waits."""

    rank: HangRank
    doing: str  # a key of the verdict's kinds
    words: str  # a clause: "it waits for a lock"
    where: HangFrame | None = None
    waits_for: HangCollective | None = None
    kind: str = ""  # of the collective, where only the stack tells it
    peer: int | None = None  # the rank that it sends to or receives from

    @property
    def has_ended(self) -> bool:
        return self.doing == "ended"

    @property
    def place(self) -> Place | None:
        return self.where.place if self.where is not None else None


def rank_doing(rank: HangRank) -> RankDoing:
    """The surest signs first: a process that is gone or stopped says nothing itself."""
    record, outside = rank.record, rank.outside
    where = user_line(training_thread(record)) if record is not None else None
    if _has_ended(rank):
        return RankDoing(rank, "ended", _end_words(rank), _last_line(rank))
    if outside is not None and outside.state in STOPPED:
        if outside.state == TRACED:
            return RankDoing(rank, "held", "it is held by a debugger", where)
        return RankDoing(rank, "stopped", "it is stopped (SIGSTOP)", where)
    if record is None and outside is not None and (moving := _moves(outside.moved)):
        return RankDoing(rank, "moving", f"{moving}, and recorded nothing yet")
    if record is None:
        words = (
            "it left a record that cannot be read" if rank.is_damaged else _silent_words(outside)
        )
        return RankDoing(rank, "silent", words, _native_line(outside))
    thread = training_thread(record)
    if thread is None:
        return RankDoing(rank, "silent", "it has no training thread any more", None)
    return _living(rank, record, thread, where)


def _living(
    rank: HangRank, record: HangRecord, thread: HangThread, where: HangFrame | None
) -> RankDoing:
    calls = _library_calls(thread)
    open_collectives = [one for one in _collectives(record) if not one.ended and not one.p2p]
    waits_for = open_collectives[0] if open_collectives else None
    is_long = record.phase in _LONG_WORDS and not record.suspects
    if _mentions(calls, _DEBUGGERS):
        return RankDoing(rank, "held", "it is held by a debugger", where)
    if _mentions(calls, (_LOADER,)) and where is not None and _loader_waits(calls):
        child = worker_at_fault(record)
        if not is_long or (child is not None and child.state in (*DEAD, *STOPPED)):
            return _waits_for_worker(rank, record, child, where)
    if any(call.function.endswith(INIT) for call in calls):
        words = f"it waits for other ranks in {INIT}"
        return RankDoing(rank, "collective", words, where, None, INIT)
    if _in_collective(thread, calls, where, waits_for):
        kind = waits_for.kind if waits_for is not None else _called_kind(calls)
        words = f"it waits in {kind or 'a collective'}"
        if waits_for is None and (peer := _peer(calls)) is not None:
            words += f" {'to' if kind == 'send' else 'from'} rank {peer}"
            return RankDoing(rank, "collective", words, where, None, kind, peer)
        return RankDoing(rank, "collective", words, where, waits_for, kind)
    if is_long:
        return RankDoing(rank, "long", _LONG_WORDS[record.phase], where)
    if (lock := lock_words(thread, calls, where)) and not _is_running(thread, record):
        return RankDoing(rank, "lock", lock, where)
    if _waits_for_device(record, where):
        return RankDoing(rank, "device", _device_words(record), where)
    moving = _moving_words(record) or _child_words(thread, calls, record)
    if moving and not _runs(thread.cpu_s, record.process.moved.seconds):
        return RankDoing(rank, "moving", moving, where)
    if _is_running(thread, record):
        return RankDoing(rank, "python", "it runs without an end so far", where)
    return RankDoing(rank, "blocked", _call_words(thread), where)


def _waits_for_worker(
    rank: HangRank, record: HangRecord, child: HangProcess | None, where: HangFrame
) -> RankDoing:
    if child is not None and _works(child, record):
        words = f"it waits for a batch of worker {child.pid}, which still works"
        return RankDoing(rank, "moving", words, worker_line(child) or where)
    return RankDoing(rank, "loader", f"it waits for a batch{_worker_words(record)}", where)


# Stacks.


def training_thread(record: HangRecord | None) -> HangThread | None:
    threads = record.threads if record is not None else []
    return next((thread for thread in threads if thread.trains), None) or next(
        (thread for thread in threads if thread.name == "MainThread"), None
    )


def user_line(thread: HangThread | None) -> HangFrame | None:
    """The innermost line of the user's own code, else the innermost one."""
    frames = thread.frames if thread is not None else []
    return next((frame for frame in frames if frame.own), frames[0] if frames else None)


def _library_calls(thread: HangThread) -> list[HangFrame]:
    """What the innermost own line has called."""
    calls = []
    for frame in thread.frames:
        if frame.own:
            break
        calls.append(frame)
    return calls


def _mentions(calls: Sequence[HangFrame], parts: Sequence[str]) -> bool:
    return any(part in call.file for call in calls for part in parts)


def _loader_waits(calls: Sequence[HangFrame]) -> bool:
    """Not a loader that makes its batches itself: there the dataset's line is the innermost."""
    return any(call.function.endswith(("_try_get_data", "_get_data")) for call in calls)


def _in_collective(
    thread: HangThread,
    calls: Sequence[HangFrame],
    where: HangFrame | None,
    waits_for: HangCollective | None,
) -> bool:
    if _mentions(calls, _DISTRIBUTED):
        return waits_for is not None or bool(_called_kind(calls))
    if waits_for is None or thread.call in _SLEEPS or thread.state in ("R", "D"):
        return False
    if _mentions(calls, _BACKWARD):
        return True
    text = where.text if where is not None else ""
    return not calls and (bool(_WAIT_TEXT.search(text)) or ".backward(" in text)


def _called_kind(calls: Sequence[HangFrame]) -> str:
    names = [call.function.rpartition(".")[2] for call in calls]
    return next((kind for name in names for kind in _KINDS if name.startswith(kind)), "")


def _peer(calls: Sequence[HangFrame]) -> int | None:
    """The rank in the arguments of torch's send or recv."""
    named = (call.numbers.get(name) for call in calls for name in ("src", "dst"))
    return next((peer for peer in named if peer is not None), None)


def _collectives(record: HangRecord) -> list[HangCollective]:
    return record.collectives.last if record.collectives is not None else []


def lock_words(
    thread: HangThread, calls: Sequence[HangFrame], where: HangFrame | None
) -> str | None:
    """None for a thread that waits for no other thread of its process."""
    if thread.call in _SLEEPS:
        return None
    if calls and any(part in calls[0].file for part in _PYTHON_LOCKS):
        name = calls[0].function.rpartition(".")[2]
        if "queue" in calls[-1].file:
            return "it waits for an item of a queue"
        joins = name in ("join", "_wait_for_tstate_lock") or any(
            "join" in c.function for c in calls
        )
        return "it waits for a thread to end" if joins else "it waits for another thread"
    text = where.text if where is not None and not calls else ""
    return "it waits for a lock" if _LOCK_TEXT.search(text) else None


def lock_waiters(record: HangRecord) -> list[tuple[HangThread, HangFrame]]:
    """Threads of the user's own code that wait for a lock, and their lines."""
    waiters = []
    for thread in record.threads:
        where = user_line(thread)
        calls = _library_calls(thread)
        if where is not None and where.own and lock_words(thread, calls, where):
            waiters.append((thread, where))
    return waiters


# Processes.


def _has_ended(rank: HangRank) -> bool:
    """Before it could record anything: one that did has been ended since."""
    outside = rank.outside
    if rank.record is not None:
        return False
    if rank.status == "finished":
        return True
    if outside is not None:
        return outside.gone or outside.state in DEAD
    return rank.state in ("gone", "restarted")


def _end_words(rank: HangRank) -> str:
    if rank.last_words is not None:
        return f"it ended with {rank.last_words.exception}"
    if rank.status == "finished":
        return f"it ended after {counted(rank.steps or 0, 'step')}, as if its work was done"
    outside = rank.outside or HangProcess()
    words = "it is gone (a signal killed it, or it left by os._exit)"
    if outside.ended_by:
        how = "was killed by" if outside.ended_by.startswith("SIG") else "ended with"
        words = f"it {how} {outside.ended_by}"
    memory = ", and its host killed a process for lack of memory"
    return f"{words}{memory}" if outside.out_of_memory else words


def stderr_words(outside: HangProcess) -> str | None:
    """Where the last words of a rank that ended are."""
    file = outside.stderr
    if not file.startswith("/"):
        return f"its stderr went to {file}: its last lines are not known here" if file else None
    if not outside.last_lines:
        return f"it wrote nothing to its stderr, {file}"
    shared = ", which other ranks write as well" if outside.shares_stderr else ""
    return f"its stderr is {file}{shared}"


def _last_line(rank: HangRank) -> HangFrame | None:
    place = rank.last_words.place if rank.last_words is not None else None
    if place is not None:
        return HangFrame(file=place.file, line=place.line, function=place.function, own=True)
    return user_line(training_thread(rank.record))


def _silent_words(outside: HangProcess | None) -> str:
    if outside is None:
        return "it recorded nothing, and nobody saw its process"
    if _runs(outside.moved.cpu_s, outside.moved.seconds):
        return "it recorded nothing: a call outside Python runs and lets no other thread run"
    if outside.state == "D":
        return "it recorded nothing: its process waits for a disk or a driver"
    in_call = f" in {outside.call}" if outside.call else ""
    return f"it recorded nothing: a call outside Python waits{in_call} and holds Python's lock"


_NATIVE_FRAME = re.compile(r"^\s*(?P<function>\S+) \((?P<file>[^():]+\.py):(?P<line>\d+)\)", re.M)


def _native_line(outside: HangProcess | None) -> HangFrame | None:
    """The innermost Python line that py-spy printed."""
    for found in _NATIVE_FRAME.finditer(outside.native if outside is not None else ""):
        if "-packages" not in found["file"] and "/lib/python" not in found["file"]:
            line = int(found["line"][:9])
            return HangFrame(file=found["file"], line=line, function=found["function"], own=True)
    return None


def _is_running(thread: HangThread, record: HangRecord) -> bool:
    return thread.state == "R" or _runs(thread.cpu_s, record.process.moved.seconds)


def _runs(cpu_s: float | None, seconds: float) -> bool:
    return cpu_s is not None and seconds > 0 and cpu_s >= _RUNS * seconds


def _moving_words(record: HangRecord) -> str | None:
    moving = _moves(record.process.moved) or _moves(record.process.lately)
    return None if _lasts(record) else moving


def _moves(moved: HangMoved) -> str | None:
    """A process whose files or memory still move may only be slow."""
    seconds = max(moved.seconds, 1e-3)
    if (moved.major_faults or 0) / seconds >= _MOVES_FAULTS_S:
        return "it waits for memory that the system swaps in"
    input_bytes = max(moved.input_bytes or 0, moved.disk_bytes or 0)
    for words, size_bytes in (("reads", input_bytes), ("writes", moved.output_bytes or 0)):
        if size_bytes / seconds >= _MOVES_BYTES_S:
            return f"it still {words} {byte_rate(size_bytes / seconds)}"
    return None


def _lasts(record: HangRecord) -> bool:
    """What has worked on for so long may have no end."""
    return 0 < _LONG_TIMES * record.limit_s < record.silent_s


def _works(child: HangProcess, record: HangRecord) -> bool:
    """A process that computes or reads, unless it has done so for very long."""
    moved = child.moved
    runs = child.state == "R" or _runs(moved.cpu_s, moved.seconds)
    return not _lasts(record) and (runs or _moves(moved) is not None)


def _child_words(thread: HangThread, calls: Sequence[HangFrame], record: HangRecord) -> str | None:
    """None unless it waits for a program, or a pool, that works."""
    if thread.call not in ("wait4", "waitid") and not _mentions(calls, _WAITS_FOR_CHILD):
        return None
    child = next((child for child in record.children if _works(child, record)), None)
    name = f" ({child.name})" if child is not None and child.name else ""
    return f"it waits for process {child.pid}{name}, which still works" if child else None


def _waits_for_device(record: HangRecord, where: HangFrame | None) -> bool:
    device = record.device
    if device is None:
        return False
    text = where.text if where is not None else ""
    return (
        not device.answers or bool(device.error) or bool(device.busy and _DEVICE_TEXT.search(text))
    )


def _device_words(record: HangRecord) -> str:
    device = record.device
    assert device is not None
    if not device.answers:
        return "it waits for its GPU, which does not answer"
    if device.error:
        return f"it waits for its GPU, which reports {device.error}"
    return "it waits for its GPU, which does not finish what was queued"


def _call_words(thread: HangThread) -> str:
    call, file = thread.call, thread.file
    if thread.state == "D":
        return f"it waits for a disk or a driver{_of(file)}"
    if call in _SLEEPS:
        return "it sleeps"
    if file.startswith("pipe:"):
        return f"it waits for a pipe ({call})"
    if file.startswith("socket:"):
        return f"it waits for a socket ({call})"
    if call in ("flock", "fcntl"):
        return f"it waits for a file lock{_of(file)}"
    if file:
        return f"it waits in {call}{_of(file)}"
    if call in ("wait4", "waitid"):
        return "it waits for a process to end"
    return f"it waits in {call}" if call and call != "futex" else "it waits"


def _of(file: str) -> str:
    return f" of {file}" if file.startswith("/") else ""


# Workers of a data loader.


def worker_at_fault(record: HangRecord) -> HangProcess | None:
    """The one that keeps the batch back: dead, stopped, or at a line of the user's."""
    for states in (DEAD, STOPPED, ("D",)):
        for child in record.children:
            if child.state in states:
                return child
    busy = [child for child in record.children if worker_line(child) is not None]
    return busy[0] if busy else None


def worker_line(child: HangProcess) -> HangFrame | None:
    """The dataset's line that runs there; None for a worker that waits for work."""
    thread = training_thread(HangRecord(threads=child.threads))
    return next((frame for frame in thread.frames if frame.own), None) if thread else None


def _worker_words(record: HangRecord) -> str:
    child = worker_at_fault(record)
    if child is None:
        return f" of {counted(len(record.children), 'worker')}" if record.children else ""
    name = f"worker {child.pid}"
    if child.state in DEAD:
        return f": {name} has died"
    if child.state in STOPPED:
        return f": {name} is stopped"
    if child.state == "D":
        return f": {name} waits for a disk"
    return f" of {name}"


# Who waits for whom: collectives by group and sequence number, over all ranks.

_MOST_MEMBERS = 1 << 20
# Shapes of these may differ between ranks.
_UNEVEN = frozenset(("all_to_all", "gather", "scatter", "all_gather", "reduce_scatter", "barrier"))


class Missing(NamedTuple):
    """Ranks that a collective waits for, and those that wait in it."""

    collective: HangCollective
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]


class Waits(NamedTuple):
    """The graph of waits, reduced to what explains it."""

    missing: tuple[Missing, ...]  # by ranks that wait for nobody themselves
    cycle: tuple[int, ...]  # ranks that wait for each other in different groups
    different: tuple[tuple[HangCollective, tuple[int, ...]], ...]  # at one place of a group
    entered_by_all: tuple[Missing, ...]  # that nobody ends
    by_stack: tuple[int, ...]  # ranks in a collective that no recorder knows


def find_waits(states: Mapping[int, RankDoing]) -> Waits:
    waiting = {rank: state for rank, state in states.items() if state.doing == "collective"}
    members = _members(states)
    missing: dict[tuple[str, int], tuple[HangCollective, list[int], set[int]]] = {}
    complete: dict[tuple[str, int], tuple[HangCollective, list[int]]] = {}
    edges: dict[int, set[int]] = {}
    lacking: dict[tuple[str, int], set[int]] = {}
    for rank, state in waiting.items():
        collective = state.waits_for
        if collective is None or collective.sequence is None:
            continue
        place = (collective.group, collective.sequence)
        if place not in lacking:
            lacking[place] = _lacking(place, members, states)
        absent = lacking[place] - {rank}
        edges[rank] = absent
        if absent:
            missing.setdefault(place, (collective, [], absent))[1].append(rank)
        else:
            complete.setdefault(place, (collective, []))[1].append(rank)
    roots = []
    for collective, ranks, absent in missing.values():
        free = tuple(sorted(rank for rank in absent if rank not in edges or not edges[rank]))
        if free:
            roots.append(Missing(collective, free, tuple(sorted(ranks))))
    # A rank that waits in a finished set of its own keeps others waiting, but not by itself.
    own = [one for one in roots if any(rank not in edges for rank in one.ranks)]
    if own:
        roots = [
            one._replace(ranks=tuple(rank for rank in one.ranks if rank not in edges))
            for one in own
        ]
    else:
        roots = []
    return Waits(
        missing=tuple(sorted(roots, key=lambda one: -len(one.waiting))),
        cycle=_cycle(edges) if not roots else (),
        different=_different(waiting),
        entered_by_all=tuple(
            Missing(collective, (), tuple(sorted(ranks))) for collective, ranks in complete.values()
        ),
        by_stack=tuple(rank for rank, state in waiting.items() if rank not in edges),
    )


def _members(states: Mapping[int, RankDoing]) -> dict[str, tuple[int, ...]]:
    members: dict[str, tuple[int, ...]] = {}
    for state in states.values():
        record = state.rank.record
        for group in record.collectives.groups if record and record.collectives else ():
            if group.name not in members:
                members[group.name] = _ranks_of(group)
    return members


def _ranks_of(group: HangGroup) -> tuple[int, ...]:
    each = (range(first, last + 1, step) for first, last, step in group.ranges)
    ranks = sorted({*group.ranks, *islice(chain.from_iterable(each), _MOST_MEMBERS)})
    return tuple(ranks) or tuple(range(min(group.size or 0, _MOST_MEMBERS)))


def _lacking(
    place: tuple[str, int],
    members: Mapping[str, Sequence[int]],
    states: Mapping[int, RankDoing],
) -> set[int]:
    """Members that have not entered it, as far as is known."""
    name, sequence = place
    absent = set()
    for rank in members.get(name, ()):
        state = states.get(rank)
        record = state.rank.record if state is not None else None
        if record is None or record.collectives is None:
            absent.add(rank)
            continue
        reached = record.collectives.reached.get(name)
        if reached is None or reached.entered < sequence:
            absent.add(rank)
    return absent


def _cycle(edges: Mapping[int, set[int]]) -> tuple[int, ...]:
    """Ranks that can be reached from themselves: the first such ring."""
    for start in sorted(edges):
        path, here, seen = [start], start, {start}
        while True:
            following = next((rank for rank in sorted(edges.get(here, ())) if rank in edges), None)
            if following is None:
                break
            if following in seen:
                return tuple(path[path.index(following) :])
            path.append(following)
            seen.add(following)
            here = following
    return ()


def _different(
    waiting: Mapping[int, RankDoing],
) -> tuple[tuple[HangCollective, tuple[int, ...]], ...]:
    """Ranks that call the same place of a group by different names or shapes."""
    places: dict[tuple[str, int], dict[tuple[object, ...], list[int]]] = defaultdict(dict)
    first: dict[tuple[object, ...], HangCollective] = {}
    for rank, state in waiting.items():
        one = state.waits_for
        if one is None or one.sequence is None:
            continue
        shape = None if one.kind in _UNEVEN else (str(one.input_sizes), one.dtype)
        key = (one.group, one.sequence, one.kind, shape)
        first.setdefault(key, one)
        places[one.group, one.sequence].setdefault(key, []).append(rank)
    for alike in places.values():
        if len(alike) > 1:
            order = sorted(alike, key=lambda key: len(alike[key]))
            return tuple((first[key], tuple(alike[key])) for key in order)
    return ()
