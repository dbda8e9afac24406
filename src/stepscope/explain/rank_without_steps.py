"""A rank of which no step is known: a CUDA memory snapshot, explained and replayed, or a run
of which only the parameter server's events were kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope import changes as remedies
from stepscope.errors import NotCapturedError, UsageError
from stepscope.explain.findings import sort_findings
from stepscope.explain.findings.healthy import healthy
from stepscope.explain.findings.memory import find_leak, fragmentation, memory_near_limit
from stepscope.explain.host_calls import is_library
from stepscope.explain.incomplete_ranks import MEMORY_ONLY, SERVER_ONLY, untimed_rank
from stepscope.explain.memory.captured import fragmentation_of
from stepscope.explain.memory.lifetimes import thinned
from stepscope.explain.memory.model import biggest, held_words
from stepscope.explain.memory.traced import largest_sites
from stepscope.explain.parameter_server import summarise_together
from stepscope.records.explanation import Finding, RankExplanation
from stepscope.records.memory import (
    ACTIONS,
    BLOCK_STATES,
    CATEGORIES,
    Categories,
    Fragmentation,
    History,
    Memory,
    MemoryTimeline,
    OutOfMemory,
    SiteBytes,
    Snapshot,
)
from stepscope.records.parameter_server import TogetherSummary, TogetherVerdict
from stepscope.records.quality import Note
from stepscope.step.arrays import Indices, Int64s
from stepscope.text.figures import significant, size
from stepscope.text.figures import size as size_words
from stepscope.text.words import counted
from stepscope.trace.run_folder.server_events import read_server_events


def explain_snapshot(path: Path, name: str, limit_bytes: int | None) -> RankExplanation:
    """`path` is where the file can be read, `name` what the user calls it."""
    from stepscope.trace.formats.snapshot import read_snapshot

    snapshot = read_snapshot(path)
    memory, contradictions = memory_of_snapshot(snapshot, limit_bytes)
    return untimed_rank(
        path=name,
        kind="cuda",
        events=sum(len(history) for history in snapshot.histories),
        findings=find_in_memory(memory),
        quality=(
            Note(id=MEMORY_ONLY, detail="a memory snapshot: it holds memory and nothing else"),
            *snapshot.quality,
            *contradictions,
        ),
        memory=memory,
    )


def refuse_mixtures(ranks: Sequence[RankExplanation]) -> None:
    """A snapshot has no rank and no clock: among other files it would only look like one."""
    snapshots = [
        rank.path for rank in ranks if rank.memory is not None and rank.memory.source == "snapshot"
    ]
    if snapshots and len(ranks) > 1:
        raise UsageError(f"{snapshots[0]} is a memory snapshot: give it alone, one at a time")


def find_in_memory(memory: Memory) -> tuple[Finding, ...]:
    """The most severe first; with nothing wrong, what the memory holds."""
    rules = (memory_near_limit.judge, fragmentation.judge, find_leak)
    problems = [finding for find in rules if (finding := find(memory))]
    reserved = f" of {size(memory.reserved_bytes)} reserved" if memory.reserved_bytes else ""
    return sort_findings(
        [
            healthy.finding(
                title="Memory",
                share=0.0,
                of="memory",
                severity="none",
                summary=f"{size(memory.peak_bytes)} allocated{reserved} ({memory.measured}). "
                f"Most of it is {biggest(memory)}.",
                evidence=(
                    *held_words(memory),
                    "no request failed, and little of what is reserved is unused",
                ),
                remedies=(
                    remedies.STEPSCOPE_RUN.offer(
                        "Record with `stepscope run`: it separates parameters, gradients, "
                        "optimizer state and activations"
                    ),
                ),
            ),
            *problems,
        ]
    )


# Explains a CUDA memory snapshot: its final state, its history replayed, what allocated.
#
# The history is a ring that may have lost its beginning, but never its end: levels are counted
# backwards from the final state. The allocator records the requested bytes, but blocks are
# multiples of 512 bytes, so allocations are rounded up.

_ALLOC, _FREE = ACTIONS.index("alloc"), ACTIONS.index("free_requested")
_TAKES = [ACTIONS.index(name) for name in ("segment_alloc", "segment_map")]
_GIVES = [ACTIONS.index(name) for name in ("segment_free", "segment_unmap")]
_OOM = ACTIONS.index("oom")
_ALLOCATED, _INACTIVE = BLOCK_STATES.index("active_allocated"), BLOCK_STATES.index("inactive")
_ROUNDING = 512
_SHOWN = 8
BEFORE = "(before the history began)"
UNKNOWN = "(no stack recorded)"
NO_CATEGORIES = (
    "a snapshot does not say what a block is for: all of it counts as other, and by_site says "
    "what allocated it"
)
NO_STACKS = (
    "the snapshot has no stacks: record with "
    "torch.cuda.memory._record_memory_history(stacks='python')"
)
NO_HISTORY = (
    "the snapshot has no history: its last state is shown, not its peak (call "
    "torch.cuda.memory._record_memory_history() before the steps)"
)


class _Played(msgspec.Struct, frozen=True, kw_only=True):
    """A device's history with levels right after every event."""

    history: History
    allocated: Int64s
    reserved: Int64s | None  # None if less would be reserved than allocated
    lives: _Lives
    peak: int


def memory_of_snapshot(
    snapshot: Snapshot, limit_bytes: int | None = None
) -> tuple[Memory, tuple[Note, ...]]:
    """The device with the most reserved memory; and where its history contradicts its blocks."""
    device, others = _device(snapshot)
    here = snapshot.segments.device == device
    in_device = here[snapshot.blocks.segment]
    held = in_device & (snapshot.blocks.state == _ALLOCATED)
    free = in_device & (snapshot.blocks.state == _INACTIVE)
    size = snapshot.blocks.size_bytes
    private = (snapshot.segments.private == 1)[snapshot.blocks.segment]
    in_pools = int(size[free & private].sum())
    allocated, reserved = int(size[held].sum()), int(snapshot.segments.total_bytes[here].sum())
    history = next((recorded for recorded in snapshot.histories if recorded.device == device), None)
    played = None
    if history is not None and len(history):
        ends = _lives(history, snapshot.blocks.address[held], size[held])
        played = _play(history, ends, allocated, reserved)
    peak = allocated if played is None else int(played.allocated[played.peak])
    at_peak = reserved if played is None else _reserved_at(played, played.peak)
    at_end = _at_end(allocated + in_pools, reserved, size[free & ~private])
    notes = [NO_CATEGORIES]
    if in_pools:
        notes.append(
            f"private pools of CUDA graphs keep {size_words(in_pools)} besides, for replays"
        )
    if played is None:
        notes.append(NO_HISTORY)
    if not snapshot.stacks:
        notes.append(NO_STACKS)
    if others:
        notes.append(f"other devices are in the snapshot too and are not shown: {_listed(others)}")
    if snapshot.unknown_actions:
        notes.append(f"actions that are not known: {', '.join(snapshot.unknown_actions[:5])}")
    categories: Categories = dict.fromkeys(CATEGORIES)
    measured = "the last state" if played is None else "the highest point of the recorded history"
    memory = Memory(
        source="snapshot",
        device="cuda",
        peak_bytes=peak,
        reserved_bytes=at_peak,
        phase=None,
        measured=measured,
        categories={**categories, "other": peak},
        by_site=_sites(snapshot, held, played, peak),
        timeline=_timeline(played) if played is not None else None,
        fragmentation=fragmentation_of(peak + in_pools, at_peak) if played is not None else at_end,
        at_end=at_end,
        out_of_memory=_failures(snapshot, played),
        limit_bytes=_limit(limit_bytes, played),
        notes=tuple(notes),
    )
    return memory, _contradictions(played)


def _listed(devices: list[int]) -> str:
    shown = ", ".join(map(str, devices[:_SHOWN]))
    return shown if len(devices) <= _SHOWN else f"{shown} and {len(devices) - _SHOWN} more"


def _device(snapshot: Snapshot) -> tuple[int, list[int]]:
    reserved = Counter({history.device: 0 for history in snapshot.histories if len(history)})
    devices, sizes = snapshot.segments.device.tolist(), snapshot.segments.total_bytes.tolist()
    for device, segment_bytes in zip(devices, sizes, strict=True):
        reserved[device] += segment_bytes
    if not reserved:
        return 0, []
    chosen = max(reserved, key=lambda device: reserved[device])
    return chosen, sorted(device for device in reserved if device != chosen)


class _Lives(msgspec.Struct, frozen=True):
    """Allocations of a history that agree with the snapshot's blocks."""

    allocates: Indices
    released: Int64s  # for each of `allocates`: the row of its release, or the history's length
    strangers: Indices  # releases without an allocation
    contradicted: Indices  # allocations never released that the final state does not show


def _lives(history: History, held_address: Int64s, held_bytes: Int64s) -> _Lives:
    """An allocation alive at the end must lie in a block that is at least as large: the final state
    is known, so an allocation that it does not show does not count."""
    moves = np.flatnonzero((history.action == _ALLOC) | (history.action == _FREE))
    allocates, released, strangers = _pair(history, moves)
    order = np.argsort(held_address, kind="stable")
    address, room = held_address[order], held_bytes[order]
    alive = np.flatnonzero(released == len(history))
    wanted = history.address[allocates[alive]]
    place = np.searchsorted(address, wanted)
    inside = np.minimum(place, max(0, len(address) - 1))
    shown = np.zeros(len(alive), np.bool_)
    if len(address):
        enough = room[inside] >= _rounded(history.size_bytes[allocates[alive]])
        shown = (place < len(address)) & (address[inside] == wanted) & enough
    agrees = np.ones(len(allocates), np.bool_)
    agrees[alive[~shown]] = False
    return _Lives(allocates[agrees], released[agrees], strangers, allocates[~agrees])


def _rounded(size_bytes: Int64s) -> Int64s:
    """The least that a request of this size takes."""
    return -(-size_bytes // _ROUNDING) * _ROUNDING


def _play(history: History, lives: _Lives, allocated_end: int, reserved_end: int) -> _Played:
    action, size = history.action, history.size_bytes
    rounded = _rounded(size)
    delta = np.zeros(len(history), np.int64)
    delta[lives.allocates] = rounded[lives.allocates]
    matched = lives.released < len(history)
    np.add.at(delta, lives.released[matched], -rounded[lives.allocates[matched]])
    delta[lives.strangers] = -rounded[lives.strangers]
    taken = np.where(np.isin(action, _TAKES), size, 0) - np.where(np.isin(action, _GIVES), size, 0)
    level = allocated_end - (delta.sum() - np.cumsum(delta))
    reserved = reserved_end - (taken.sum() - np.cumsum(taken))
    return _Played(
        history=history,
        allocated=level,
        reserved=reserved if (reserved >= level).all() else None,
        lives=lives,
        peak=int(level.argmax()),
    )


def _pair(history: History, moves: Indices) -> tuple[Indices, Int64s, Indices]:
    """Allocations, the end of each, and releases without an allocation. An address that is reused
    was released in between, recorded or not."""
    order = moves[np.argsort(history.address[moves], kind="stable")]
    first, second = order[:-1], order[1:]
    same = history.address[first] == history.address[second]
    same &= history.action[first] == _ALLOC
    released = np.full(len(history), len(history), np.int64)
    released[first[same]] = second[same]
    known = np.zeros(len(history), np.bool_)
    known[second[same]] = True
    allocates = np.flatnonzero(history.action == _ALLOC)
    strangers = np.flatnonzero((history.action == _FREE) & ~known)
    return allocates, released[allocates], strangers


def _contradictions(played: _Played | None) -> tuple[Note, ...]:
    """Contradictions between the history and the blocks; the blocks count."""
    if played is None:
        return ()
    notes = []
    count = len(played.lives.contradicted)
    if count:
        first = int(played.lives.contradicted[0])
        detail = (
            f"not used: {counted(count, 'allocation')} of the history that the blocks at the end "
            f"do not show, the first event {first:,} "
            f"({size_words(int(played.history.size_bytes[first]))})"
        )
        notes.append(Note(id="contradictions", detail=detail, count=count))
    if played.reserved is None:
        detail = (
            "reserved memory over time is not known: by the history less would be reserved than "
            "allocated"
        )
        notes.append(Note(id="contradictions", detail=detail))
    return tuple(notes)


def _reserved_at(played: _Played, row: int) -> int | None:
    return None if played.reserved is None else int(played.reserved[row])


def _at_end(allocated: int, reserved: int, free: Int64s) -> Fragmentation | None:
    if not reserved:
        return None
    return Fragmentation(
        at="end",
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        share=max(0.0, 1 - allocated / reserved),
        largest_free_bytes=int(free.max(initial=0)),
        free_blocks=len(free),
    )


def _limit(given: int | None, played: _Played | None) -> int | None:
    """The user's limit; else what the device held when it ran out of memory."""
    if given is not None or played is None:
        return given
    failures = np.flatnonzero(played.history.action == _OOM)
    if not len(failures) or played.reserved is None:
        return None
    whole = played.reserved[failures] + np.maximum(played.history.address[failures], 0)
    return int(whole.max())


def _timeline(played: _Played) -> MemoryTimeline:
    time = played.history.time_us * 1000
    reserved = played.reserved
    if (time < 0).any() or (np.diff(time) < 0).any():
        time = np.arange(len(played.history), dtype=np.int64)  # then by event
    rows = thinned(time, played.allocated)
    start = int(time[0])
    return MemoryTimeline(
        of="the recorded history",
        start_ns=start,
        time_ns=tuple((time[rows] - start).tolist()),
        allocated_bytes=tuple(played.allocated[rows].tolist()),
        reserved_bytes=None if reserved is None else tuple(reserved[rows].tolist()),
        categories={},
    )


def _sites(
    snapshot: Snapshot, held: NDArray[np.bool_], played: _Played | None, peak: int
) -> tuple[SiteBytes, ...]:
    """What is held at the peak by allocating place; the places add up to the peak."""
    stacks, sizes = _held_at_end(snapshot, held, played)
    if played is not None:
        lives = played.lives
        rows = lives.allocates[(lives.allocates <= played.peak) & (lives.released > played.peak)]
        stacks = np.append(stacks, played.history.stack[rows])
        sizes = np.append(sizes, _rounded(played.history.size_bytes[rows]))
    codes = stacks.astype(np.int64) + 1
    total = np.zeros(len(snapshot.stacks) + 1, np.int64)
    np.add.at(total, codes, sizes)
    blocks = np.bincount(codes, minlength=len(total))
    merged: dict[tuple[str, str | None, int | None, str], list[int]] = {}
    for code in np.flatnonzero(blocks).tolist():
        site = _site(snapshot.stacks[code - 1]) if code else (UNKNOWN, None, None, "")
        sums = merged.setdefault(site, [0, 0])
        sums[0] += int(total[code])
        sums[1] += int(blocks[code])
    left = peak - sum(size for size, _ in merged.values())
    if left > 0:
        merged[(BEFORE, None, None, "")] = [left, 0]
    return largest_sites(
        SiteBytes(operator=what, file=file, line=line, function=name, size_bytes=size, blocks=count)
        for (what, file, line, name), (size, count) in merged.items()
    )


def _held_at_end(
    snapshot: Snapshot, held: NDArray[np.bool_], played: _Played | None
) -> tuple[NDArray[np.int32], Int64s]:
    """Blocks alive at the end whose allocation the history lacks: they were held all along."""
    rows = np.flatnonzero(held)
    if played is not None:
        alive = played.lives.released == len(played.history)
        seen = played.history.address[played.lives.allocates[alive]]
        rows = rows[~np.isin(snapshot.blocks.address[rows], seen)]
    return snapshot.blocks.stack[rows], snapshot.blocks.size_bytes[rows]


def _site(stack: tuple[tuple[str, int, str], ...]) -> tuple[str, str | None, int | None, str]:
    """The innermost frame of the user's code; else of any Python; else the innermost."""
    python = [frame for frame in stack if frame[0].endswith(".py")]
    own = [frame for frame in python if not is_library(f"{frame[0]}({frame[1]}): {frame[2]}")]
    file, line, name = (own or python or list(stack))[0]
    inner = stack[0]
    what = inner[2] if inner[0] != file or inner[2] != name else ""
    known = file.endswith(".py") and line > 0
    return what or name or UNKNOWN, file if known else None, line if known else None, name


def _failures(snapshot: Snapshot, played: _Played | None) -> tuple[OutOfMemory, ...]:
    if played is None:
        return ()
    history = played.history
    out = []
    for row in np.flatnonzero(history.action == _OOM).tolist():
        code = int(history.stack[row])
        _, file, line, name = _site(snapshot.stacks[code]) if code >= 0 else ("", None, None, "")
        free = int(history.address[row])
        out.append(
            OutOfMemory(
                asked_bytes=int(history.size_bytes[row]),
                device_free_bytes=free if free > 0 else None,
                allocated_bytes=int(played.allocated[row]),
                reserved_bytes=_reserved_at(played, row),
                file=file,
                line=line,
                function=name,
            )
        )
    return tuple(out)


# A run of which only the parameter server's events were kept, in the place of a rank.

_PAYS: dict[TogetherVerdict, str] = {
    "pays": "pays",
    "does not pay": "does not pay",
    "barrier": "consistency",
    "one worker": "consistency",
}


def explain_server(path: Path, name: str) -> RankExplanation:
    """`path` is the server's description in a run folder, `name` what the user calls it. Raises
    NotCapturedError if no worker finished a step."""
    run = path.parent.parent
    summary = explain_together_folder(run)
    if summary is None:
        raise NotCapturedError(f"{run}: no worker finished a step with the parameter server")
    workers, shards = len(summary.workers), len(summary.shards)
    who = f"{counted(workers, 'worker')} and {counted(shards, 'shard')}"
    return untimed_rank(
        path=name,
        kind="cpu",
        events=sum(shard.updates + shard.pulls for shard in summary.shards) + summary.updates,
        findings=(
            healthy.finding(
                title="Parameter server",
                share=0.0,
                of="run",
                severity="none",
                summary=f"{summary.consistency} {_PAYS[summary.verdict]}: {who} apply "
                f"{significant(summary.updates_per_s)} updates per second.",
                evidence=(summary.why,),
                remedies=(
                    remedies.STEPSCOPE_RUN.offer(
                        "Start the training with `stepscope run` to see where the workers' own "
                        "time goes"
                    ),
                ),
            ),
        ),
        quality=(Note(id=SERVER_ONLY, detail="no trace: only the parameter server was recorded"),),
    )


def explain_together_folder(*runs: Path) -> TogetherSummary | None:
    """The run folders of one job; None without a parameter server or a finished step."""
    events = read_server_events(runs)
    return summarise_together(events) if events is not None else None
