"""The answer of `hang`: a sentence that names rank and line, why, and what to do next."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from msgspec.structs import replace

from stepscope.errors import NotCapturedError, StepscopeError, UnreadableInputError
from stepscope.explain.hang.rank_state import (
    INIT,
    STOPPED,
    Missing,
    RankDoing,
    Waits,
    find_waits,
    lock_waiters,
    rank_doing,
    stderr_words,
    worker_at_fault,
    worker_line,
)
from stepscope.records.folders import HANG_REQUEST
from stepscope.records.hang import (
    HangAnswer,
    HangCollective,
    HangEvidence,
    HangFrame,
    HangingRanks,
    HangKind,
    HangProcess,
    HangRank,
)
from stepscope.text.figures import long_duration, size
from stepscope.text.words import counted, named_ranks, plural, sentence
from stepscope.trace.run_folder.hang_files import read_hang
from stepscope.trace.run_folder.run_times import stamp_of

# What a rank does, the most telling first.
_KINDS: dict[str, HangKind] = {
    "ended": "ended",
    "stopped": "stopped",
    "silent": "blocked",
    "device": "device",
    "lock": "deadlock",
    "loader": "loader",
    "python": "loop",
    "blocked": "blocked",
    **dict.fromkeys(("moving", "long", "held"), "slow"),  # nobody is accused
    "collective": "unknown",
}
_ORDER = [*_KINDS]
_NUMBER = re.compile(r" (?:process )?\d")
_PEER = re.compile(r" (to|from) rank \d+$")
_LEAST_RETRIES = 3  # of one segment: fewer are ordinary loss
_MOST_NAMED, _MOST_ABSENT = 3, 1 << 17
_NEXT: dict[str, tuple[str, ...]] = {
    "missing": ("Look for branches on the rank, or for data that ends earlier on one rank.",),
    "mismatch": ("Make all ranks call the same collective, with the same shapes, in one order.",),
    "deadlock": ("Take locks, and use groups, in the same order everywhere.",),
    "loader": ("Try num_workers=0: the batch is then made in the training process itself.",),
    "ended": ("Read that rank's own output: the others can only wait for it.",),
    "stopped": ("Continue it with `kill -CONT PID`.",),
    "device": ("Look at `dmesg`; CUDA_LAUNCH_BLOCKING=1 finds the call.",),
    "unreachable": ("Check the network between these hosts: cables, firewalls, interfaces.",),
    "loop": ("Look at that line: what ends its loop?",),
    "blocked": ("Look at that line: what does it wait for, and who would answer?",),
    "slow": ("Wait, or look again: nothing is known to hang.",),
}


_NO_LINE = ("Install py-spy: `run` then adds the stack of a rank that cannot record its own.",)


def explain_hang(evidence: HangEvidence, now: float) -> HangAnswer:
    """`now` is the Unix time. Raises NotCapturedError where nothing could have been recorded."""
    answer = _explain(evidence, now)
    return replace(answer, world_size=evidence.world_size, notes=evidence.notes)


def _explain(evidence: HangEvidence, now: float) -> HangAnswer:
    recorded = [rank for rank in evidence.ranks if rank.record is not None]
    current = [rank for rank in recorded if rank.record and rank.record.went_on is None]
    if not current and not _seen_outside(evidence, recorded):
        if recorded:
            return _went_on(recorded)
        if any(rank.is_damaged for rank in evidence.ranks):
            why = "; ".join(note.detail for note in evidence.notes[:_MOST_NAMED])
            raise UnreadableInputError(f"no rank's record of the hang can be read: {why}")
        if evidence.hang_after_s == 0:
            raise NotCapturedError("hangs were not watched in this run: --hang-after was 0")
        return _no_hang(evidence)
    states = {rank.rank: rank_doing(rank) for rank in _latest(evidence.ranks)}
    answer = _blame(states, find_waits(states))
    seconds = _seconds(evidence, current, now)
    since = f" since {long_duration(1e9 * seconds)}" if seconds else ""
    faulty = set(answer.ranks)
    ended = [state.rank for rank, state in states.items() if rank in faulty and state.has_ended]
    last = next((rank.outside for rank in ended if rank.outside is not None), HangProcess())
    return replace(
        answer,
        verdict=sentence(answer.verdict.replace("{since}", since)),
        seconds=seconds,
        groups=_groups(states, faulty),
        last_lines=tuple(last.last_lines),
        next=_NEXT.get(answer.kind, ()) if answer.kind != "blocked" or answer.where else _NO_LINE,
        is_hang=answer.kind not in ("none", "slow"),
    )


def _seen_outside(evidence: HangEvidence, recorded: Sequence[HangRank]) -> bool:
    """Whether `run` saw a rank that could not record anything, and no rank has gone on since."""
    if recorded or evidence.has_ended:
        return False
    return any(rank.outside is not None for rank in evidence.ranks)


def _latest(ranks: Sequence[HangRank]) -> list[HangRank]:
    """Without records of an earlier hang that went on."""
    return [
        replace(rank, record=None) if rank.record is not None and rank.record.went_on else rank
        for rank in ranks
    ]


def _went_on(recorded: Sequence[HangRank]) -> HangAnswer:
    records = [rank.record for rank in recorded if rank.record is not None]
    longest = max(
        (
            record.went_on.unix - record.noticed_unix + record.silent_s
            for record in records
            if record.went_on and record.went_on.unix and record.noticed_unix
        ),
        default=None,
    )
    words = f" after {long_duration(1e9 * longest)}" if longest and longest > 0 else ""
    return HangAnswer(
        kind="none",
        verdict=f"Nobody hangs: steps went on{words}.",
        seconds=max(0.0, longest) if longest is not None else None,
    )


def _no_hang(evidence: HangEvidence) -> HangAnswer:
    if evidence.has_ended:
        return HangAnswer(kind="none", verdict="No hang was recorded, and the run has ended.")
    quiet = ""
    if evidence.quiet_s is not None:
        quiet = f" The last steps were written {long_duration(1e9 * evidence.quiet_s)} ago."
    return HangAnswer(kind="none", verdict=f"No hang was recorded so far.{quiet}")


# Blame.


def _blame(states: Mapping[int, RankDoing], waits: Waits) -> HangAnswer:
    if waits.missing:
        return _missing(states, waits.missing)
    if any(state.kind == INIT for state in states.values()):
        return _not_joined(states)
    if waits.cycle:
        return _cycle(states, waits.cycle)
    if waits.different:
        return _different(states, waits.different)
    if waits.entered_by_all:
        return _nobody_ends(states, waits.entered_by_all[0])
    free = {rank: state for rank, state in states.items() if state.doing != "collective"}
    if not free:
        return _all_by_stack(states)
    return _without_collectives(states, free, len(states) - len(free))


def _missing(states: Mapping[int, RankDoing], missing: Sequence[Missing]) -> HangAnswer:
    """The most telling of the ranks that all others wait for."""
    first = missing[0]
    known = [states[rank] for rank in first.ranks if rank in states]
    waiting = len({rank for one in missing for rank in one.waiting})
    if not known:
        return HangAnswer(
            kind="ended",
            verdict=f"{named_ranks(first.ranks)} never entered {_name(first.collective)}, and "
            f"left nothing in the run folder; {_waiters(waiting)}.",
            ranks=first.ranks,
            waiting=waiting,
        )
    lead, alike, does = _lead(known)
    kind = _KINDS[lead.doing]
    if lead.doing in ("blocked", "python", "collective"):
        kind = "missing"
    verb = f"{plural(len(alike), 'has', 'have')} not yet" if kind == "slow" else "never"
    words = f"{named_ranks(alike)} {verb} entered {_name(first.collective)}; {does}"
    return _blamed(lead, alike, kind, f"{words}; {_waiters(waiting)}.", waiting)


def _lead(known: Sequence[RankDoing]) -> tuple[RankDoing, tuple[int, ...], str]:
    """The most telling rank, those that are at the same place, and what they do there."""
    lead = min(known, key=lambda state: _ORDER.index(state.doing))
    same = (state for state in known if (state.doing, state.place) == (lead.doing, lead.place))
    alike = tuple(sorted(state.rank.rank for state in same))
    does = lead.words if len(alike) == 1 else _plural(lead.words)
    return lead, alike, f"{does}{_at(_where(lead))}"


def _blamed(
    lead: RankDoing, alike: tuple[int, ...], kind: HangKind, verdict: str, waiting: int
) -> HangAnswer:
    where = _where(lead)
    return HangAnswer(
        kind=kind,
        verdict=verdict,
        why=_details(lead),
        ranks=alike,
        where=where.place if where is not None else None,
        waiting=waiting,
    )


def _plural(words: str) -> str:
    """The clause of several ranks."""
    words = _PEER.sub("", words)
    verb, _, rest = words.removeprefix("it ").partition(" ")
    many = {"is": "are", "has": "have", "its": "their"}.get(verb, verb.removesuffix("s"))
    return f"they {many} {rest}".replace(" its ", " their ")


def _waiters(count: int) -> str:
    if not count:
        return "nobody waits for it{since}"
    noun = f"{counted(count, 'other rank')} {plural(count, 'waits', 'wait')}"
    return f"{noun} for it{{since}}"


def _name(collective: HangCollective) -> str:
    number = f" #{collective.sequence}" if collective.sequence is not None else ""
    return f"{collective.kind or 'a collective'}{number} of group {collective.group or '0'}"


def _shape(collective: HangCollective) -> str:
    shapes = collective.input_sizes
    if shapes and len(shapes) == 1 and shapes[0]:
        words = " x ".join(str(length) for length in shapes[0])
        return f" ({words}{f' {collective.dtype}' if collective.dtype else ''})"
    return f" ({size(collective.size_bytes)})" if collective.size_bytes else ""


def _where(state: RankDoing) -> HangFrame | None:
    """The line to look at: for a loader, the worker's."""
    record = state.rank.record
    if state.doing == "loader" and record is not None:
        worker = worker_at_fault(record)
        line = worker_line(worker) if worker is not None else None
        if line is not None:
            return line
    return state.where


def _at(frame: HangFrame | None) -> str:
    if frame is None or not frame.file:
        return ""
    text = f" `{frame.text}`" if frame.text else ""
    return f" at {frame.place.short}{text}"


def _details(state: RankDoing) -> tuple[str, ...]:
    """What else is known about the rank at fault."""
    rank, record = state.rank, state.rank.record
    lines = []
    if record is not None:
        step = f"rank {rank.rank} is in step {record.step}"
        phase = f", phase {record.phase.replace('_', ' ')}" if record.phase else ""
        memory = record.process.rss_bytes
        used = f", and uses {size(memory)} of memory" if memory else ""
        lines.append(f"{step}{phase}{used}")
        for thread, where in lock_waiters(record)[:_MOST_NAMED]:
            if state.doing == "lock" and not thread.trains:
                lines.append(f"thread {thread.name} waits as well{_at(where)}")
    if state.has_ended and rank.outside and (words := stderr_words(rank.outside)):
        lines.append(words)
    elif rank.outside is not None and rank.outside.pid:
        lines.append(f"process {rank.outside.pid} has state {rank.outside.state or 'unknown'}")
    if state.doing == "loader" and record is not None:
        worker = worker_at_fault(record)
        if worker is not None:
            in_call = f", in {worker.call}" if worker.call else ""
            stopped = " (stopped)" if worker.state in STOPPED else ""
            lines.append(f"worker {worker.pid} has state {worker.state}{stopped}{in_call}")
    return tuple(lines)


def _not_joined(states: Mapping[int, RankDoing]) -> HangAnswer:
    """Ranks wait for each other's start."""
    waiting = sorted(rank for rank, state in states.items() if state.kind == INIT)
    world_size = max(states[rank].rank.world_size or 1 for rank in waiting)
    absent = tuple(sorted({*range(min(world_size, _MOST_ABSENT))} - {*waiting}))
    known = [states[rank] for rank in absent if rank in states]
    if known:
        lead, alike, does = _lead(known)
        words = f"{named_ranks(alike)} never reached {INIT}; {does}; {_waiters(len(waiting))}."
        return _blamed(lead, alike, "missing", words, len(waiting))
    who = named_ranks(absent) if absent else "other ranks"
    return HangAnswer(
        kind="missing",
        verdict=f"{named_ranks(waiting)} {plural(len(waiting), 'waits', 'wait')} for {who} in "
        f"{INIT}{_at(states[waiting[0]].where)}{{since}}.",
        why=("no process that could be one of them recorded anything",),
        ranks=absent,
        where=states[waiting[0]].place,
        waiting=len(waiting),
    )


def _cycle(states: Mapping[int, RankDoing], ring: Sequence[int]) -> HangAnswer:
    lines = []
    for rank in ring[:_MOST_NAMED]:
        state = states[rank]
        assert state.waits_for is not None
        lines.append(f"rank {rank} waits in {_name(state.waits_for)}{_at(state.where)}")
    waiting = sum(
        1 for rank, state in states.items() if state.doing == "collective" and rank not in ring
    )
    first = states[ring[0]]
    return HangAnswer(
        kind="deadlock",
        verdict=f"{named_ranks(sorted(ring))} wait for each other in different groups{{since}}: "
        f"{lines[0]}, {lines[1] if len(lines) > 1 else ''}.",
        why=tuple(lines),
        ranks=tuple(sorted(ring)),
        where=first.place,
        waiting=waiting,
    )


def _different(
    states: Mapping[int, RankDoing],
    different: Sequence[tuple[HangCollective, tuple[int, ...]]],
) -> HangAnswer:
    lines = [
        f"{named_ranks(ranks)} {plural(len(ranks), 'calls', 'call')} {_name(one)}{_shape(one)}"
        f"{_at(states[ranks[0]].where)}"
        for one, ranks in different
    ]
    ranks = different[0][1]
    if len(different[0][1]) == len(different[-1][1]):  # nobody is in the minority
        ranks = tuple(sorted(rank for _, alike in different for rank in alike))
    return HangAnswer(
        kind="mismatch",
        verdict=f"ranks call different collectives{{since}}: {lines[0]}, but {lines[-1]}.",
        why=tuple(lines[:_MOST_NAMED]),
        ranks=tuple(sorted(ranks)),
        where=states[different[0][1][0]].place,
        waiting=len(states) - len(ranks),
    )


def _nobody_ends(states: Mapping[int, RankDoing], entered: Missing) -> HangAnswer:
    name = _name(entered.collective)
    place = states[entered.waiting[0]].place
    for rank, state in states.items():
        record = state.rank.record
        device = record.device if record is not None else None
        if device is not None and (not device.answers or device.error):
            words = "does not answer" if not device.answers else f"reports {device.error}"
            return HangAnswer(
                kind="device",
                verdict=f"the GPU of rank {rank} {words}; all ranks have entered {name}{{since}}.",
                ranks=(rank,),
                where=place,
            )
    if (found := _unanswered(states)) is not None:
        return replace(found, where=place, waiting=len(states) - len(found.ranks))
    return HangAnswer(
        kind="unknown",
        verdict=f"every rank of its group has entered {name}, and none leaves it{{since}}: the "
        "exchange itself hangs.",
        why=("no connection shows segments that nobody acknowledges",),
        where=place,
        waiting=len(entered.waiting),
    )


def _unanswered(states: Mapping[int, RankDoing]) -> HangAnswer | None:
    """Connections that send the same segment again and again."""
    owner = {
        connection.local: rank
        for rank, state in states.items()
        for connection in (state.rank.record.connections if state.rank.record else ())
    }
    lines, ends = [], []
    for rank, state in states.items():
        for one in state.rank.record.connections if state.rank.record else ():
            if one.retries >= _LEAST_RETRIES:
                peer = owner.get(one.peer)
                name = f"rank {peer} ({one.peer})" if peer is not None else one.peer
                lines.append(
                    f"rank {rank} has sent to {name} {counted(one.retries, 'time')} in vain"
                )
                ends.append((rank, peer))
    if not lines:
        return None
    ranks = sorted({rank for pair in ends for rank in pair if rank is not None})
    return HangAnswer(
        kind="unreachable",
        verdict=f"the network does not connect {named_ranks(ranks)}{{since}}: {lines[0]}.",
        why=tuple(lines[:_MOST_NAMED]),
        ranks=tuple(ranks),
    )


def _all_by_stack(states: Mapping[int, RankDoing]) -> HangAnswer:
    """Every rank waits in an exchange that torch's recorder does not keep."""
    if (found := _unanswered(states)) is not None:
        return replace(found, where=next(iter(states.values())).place)
    kinds = sorted({state.kind or "a collective" for state in states.values()})
    sends = set(kinds) <= {"send", "recv", "batch_isend_irecv"} and len(states) > 1
    lines = [
        f"rank {rank} {state.words.removeprefix('it ')}{_at(state.where)}"
        for rank, state in list(states.items())[:_MOST_NAMED]
    ]
    first = next(iter(states.values()))
    alone = len(states) == 1
    return HangAnswer(
        kind="deadlock" if sends else "unknown",
        verdict=f"{'the rank' if alone else 'every rank'} waits in {' or '.join(kinds)}{{since}}: "
        f"{', '.join(lines[:2])}.",
        why=tuple(lines),
        ranks=tuple(sorted(states)) if sends else (),
        where=first.place,
        waiting=len(states),
    )


def _without_collectives(
    states: Mapping[int, RankDoing], free: Mapping[int, RankDoing], waiting: int
) -> HangAnswer:
    """Nobody is known to miss a collective: ranks that do not wait for others decide."""
    done = {n for n, one in free.items() if one.has_ended and one.rank.status == "finished"}
    if not waiting and done == {*free}:
        return HangAnswer(kind="slow", verdict="every rank has ended its work{since}.")
    if not waiting:
        free = {rank: state for rank, state in free.items() if rank not in done}
    asked = {state.peer for state in states.values() if state.peer in free}
    free = {rank: state for rank, state in free.items() if rank in asked} or free
    lead, alike, does = _lead([*free.values()])
    clause = does.removeprefix("it ").removeprefix("they ")
    others = f"; {_waiters(waiting)}" if waiting else "{since}"
    words = f"{named_ranks(alike)} {clause}{others}."
    return _blamed(lead, alike, _KINDS[lead.doing], words, waiting)


# All ranks.


def _seconds(evidence: HangEvidence, current: Sequence[HangRank], now: float) -> float | None:
    """Since the last step ended, by the ranks' own records."""
    records = [rank.record for rank in current if rank.record is not None]
    begun = [
        record.noticed_unix - record.silent_s
        for record in records
        if record.noticed_unix is not None
    ]
    if not begun:
        return evidence.quiet_s
    end = now
    if evidence.has_ended:
        end = max(record.noticed_unix or 0.0 for record in records)
    seconds = end - min(begun)
    return seconds if seconds > 0 and math.isfinite(seconds) else None


def _groups(states: Mapping[int, RankDoing], faulty: set[int]) -> tuple[HangingRanks, ...]:
    """Ranks by what they do and where, those at fault first, then the largest."""
    groups: dict[tuple[bool, str, tuple[str, int | None] | None], list[RankDoing]] = {}
    for state in states.values():
        words, where = _group_words(state), _where(state)
        line = (where.file, where.line) if where is not None else None
        groups.setdefault((state.rank.rank in faulty, words, line), []).append(state)
    rows = []
    for (at_fault, words, _), members in groups.items():
        where = _where(members[0])
        rows.append(
            HangingRanks(
                ranks=tuple(sorted(state.rank.rank for state in members)),
                words=words if len(members) == 1 else _plural(words).removeprefix("they "),
                where=where.place if where is not None else None,
                text=where.text if where is not None else "",
                at_fault=at_fault,
            )
        )
    return tuple(sorted(rows, key=lambda row: (not row.at_fault, -len(row.ranks), row.ranks)))


def _group_words(state: RankDoing) -> str:
    """Ranks of one group need not agree in numbers that are their own."""
    words = state.words.removeprefix("it ")
    if state.waits_for is not None:
        return f"waits in {_name(state.waits_for)}"
    if state.doing == "moving":
        return _NUMBER.split(words)[0]
    return words


# The answer for views that look at a run every second.

_FRESH_S = 5.0


def hang_now(folder: Path, now: float) -> HangAnswer | None:
    """None where nobody has recorded a hang that still lasts."""
    stamp = stamp_of(folder / HANG_REQUEST)
    return _recent_answer(folder, stamp[0], int(now / _FRESH_S)) if stamp is not None else None


@lru_cache(maxsize=8)
def _recent_answer(folder: Path, asked_ns: int, period: int) -> HangAnswer | None:
    """Ranks may write for some seconds after they were asked, so it holds for one period only."""
    del asked_ns
    try:
        answer = explain_hang(read_hang(folder), (period + 1) * _FRESH_S)
    except StepscopeError:
        return None
    return answer if answer.kind != "none" else None
