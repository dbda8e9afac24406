"""Memory through a step, without the plan and with it: what each action takes away, and when."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from stepscope.fix.saved.backward_memory import node_times
from stepscope.fix.saved.save_plan import PlanTimeline
from stepscope.fix.saved.selection import is_planned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.fix.saved.backward_memory import BackwardMemory
    from stepscope.fix.saved.selection import ValueSelection
    from stepscope.fix.saved.step_record import StepRecord

_POINTS = 120  # of each pass, at most


def plan_timeline(
    record: StepRecord,
    plain: BackwardMemory,
    selection: ValueSelection,
    memory: BackwardMemory,
    action_of: Callable[[int], str],
) -> PlanTimeline:
    """`action_of` says what is done with a value that backward kept before."""
    before = _before(record, action_of)
    ends = _picked(len(record.operators) + 1), _picked(len(plain.levels) - 1)
    after = _forward_after(record, selection, memory)
    return PlanTimeline(
        forward_points=len(ends[0]),
        before_bytes={
            action: (*_at(ends[0], forward), *_at(ends[1], backward))
            for action, (forward, backward) in before.items()
        },
        after_bytes=(*_at(ends[0], after), *_at(ends[1], memory.replay_levels[:-1])),
    )


def _before(
    record: StepRecord, action_of: Callable[[int], str]
) -> dict[str, tuple[list[int], list[int]]]:
    """By action: bytes at every operator of forward and every node of backward."""
    times = node_times(record)
    nodes, operators = max(times, default=0) + 2, len(record.operators) + 1
    first, last, sizes = dict[int, int](), dict[int, int](), dict[int, tuple[int, str]]()
    for use, time in zip(record.uses, times, strict=True):
        if use.value is None or record.values[use.value].owned:
            continue
        value = record.values[use.value]
        planned = is_planned(record, use)
        first[value.storage] = min(first.get(value.storage, use.after), use.after)
        last[value.storage] = max(last.get(value.storage, 0), time if planned else nodes - 2)
        sizes[value.storage] = (value.size_bytes, action_of(use.value) if planned else "keep")
    changes: dict[str, tuple[list[int], list[int]]] = {}
    for storage, (size_bytes, action) in sizes.items():
        forward, backward = changes.setdefault(action, ([0] * operators, [0] * (nodes + 1)))
        forward[first[storage]] += size_bytes
        backward[0] += size_bytes
        backward[last[storage] + 1] -= size_bytes
    return {
        action: (list(accumulate(forward)), list(accumulate(backward))[:-1])
        for action, (forward, backward) in sorted(changes.items())
    }


def _forward_after(
    record: StepRecord, selection: ValueSelection, memory: BackwardMemory
) -> list[int]:
    """What is held for backward after every operator, with the plan."""
    changes = [0] * (len(record.operators) + 1)
    packed: dict[int, int] = {}
    for number, use in enumerate(record.uses):
        if number in selection.encoded_uses:
            changes[use.after] += selection.encoded_uses[number].held_bytes
        elif use.value is not None:
            packed[use.value] = min(packed.get(use.value, use.after), use.after)
    for value in selection.kept | selection.encoded.keys():
        known = record.values[value]
        size_bytes = (
            selection.encoded[value].held_bytes if value in selection.encoded else known.size_bytes
        )
        begins = packed.get(value, 0 if known.producer is None else known.producer + 1)
        changes[begins] += size_bytes
    rest = memory.saved_bytes - sum(changes)
    changes[0] += max(0, rest)  # what cannot be planned
    return list(accumulate(changes))


def _picked(count: int) -> list[int]:
    """The ends of at most so many stretches of equal length."""
    points = min(_POINTS, max(1, count))
    return [-(-count * (point + 1) // points) for point in range(points)]


def _at(ends: list[int], levels: Sequence[int]) -> list[int]:
    """The highest level of each stretch."""
    starts = [0, *ends[:-1]]
    return [max(levels[start:end], default=0) for start, end in zip(starts, ends, strict=True)]
