"""A schedule run with symbols: what each rank holds, as the set of ranks whose data is in it.

Sets show what numbers hide: a contribution that was counted twice, or never came.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.records.collectives.schedule import CollectiveSchedule, Message

    Held = list[list[frozenset[int]]]  # by rank, by chunk: the ranks whose data is summed there


class WrongScheduleError(ValueError):
    """A schedule that does not compute its collective."""


def start_of(schedule: CollectiveSchedule) -> Held:
    """An all-gather begins with one chunk on each rank, the others with all of them."""
    everyone = range(schedule.ranks)
    if schedule.kind == "all_gather":
        return [[frozenset({rank} & {chunk}) for chunk in everyone] for rank in everyone]
    return [[frozenset({rank}) for _ in everyone] for rank in everyone]


def simulate(schedule: CollectiveSchedule) -> Iterator[Held]:
    """What all ranks hold at the start and after each step. Raises WrongScheduleError."""
    held = start_of(schedule)
    yield held
    for number, step in enumerate(schedule.steps):
        place = f"{schedule.algorithm} {schedule.kind}, {schedule.ranks} ranks, step {number}"
        _check_step(step, place)
        after = [list(chunks) for chunks in held]
        for message in step:
            for chunk in message.chunks:
                _deliver(after, held, message, chunk, place)
        held = after
        yield held


def prove(schedule: CollectiveSchedule) -> None:
    """Every rank ends with what the collective promises, each contribution counted once."""
    *_, held = simulate(schedule)
    whole = frozenset(range(schedule.ranks))
    for rank in range(schedule.ranks):
        for chunk in range(schedule.ranks):
            if schedule.kind == "reduce_scatter" and rank != chunk:
                continue
            wanted = frozenset({chunk}) if schedule.kind == "all_gather" else whole
            if held[rank][chunk] != wanted:
                raise WrongScheduleError(
                    f"{schedule.algorithm} {schedule.kind}, {schedule.ranks} ranks: rank {rank} "
                    f"ends with {sorted(held[rank][chunk])} in chunk {chunk}"
                )


def _check_step(step: tuple[Message, ...], place: str) -> None:
    """A pair of ranks has one message at most, and a chunk is replaced once at most."""
    if any(message.source == message.target for message in step):
        raise WrongScheduleError(f"{place}: a rank sends to itself")
    pairs = Counter((message.source, message.target) for message in step)
    written = Counter((message.target, chunk) for message in step for chunk in message.chunks)
    replaced = {
        (message.target, chunk) for message in step if not message.adds for chunk in message.chunks
    }
    if max(pairs.values(), default=0) > 1:
        raise WrongScheduleError(f"{place}: two messages between the same ranks")
    if any(written[where] > 1 for where in replaced):
        raise WrongScheduleError(f"{place}: a chunk is replaced and written again")


def _deliver(after: Held, before: Held, message: Message, chunk: int, place: str) -> None:
    sent = before[message.source][chunk]
    there = after[message.target][chunk]
    if not sent:
        raise WrongScheduleError(f"{place}: rank {message.source} has no chunk {chunk} to send")
    if message.adds and sent & there:
        raise WrongScheduleError(
            f"{place}: rank {message.target} would count {sorted(sent & there)} twice"
        )
    if not message.adds and not there <= sent:
        raise WrongScheduleError(
            f"{place}: rank {message.target} would lose {sorted(there - sent)} in chunk {chunk}"
        )
    after[message.target][chunk] = sent | there
