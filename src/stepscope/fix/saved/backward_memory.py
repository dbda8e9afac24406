"""How much of what backward needs is there at once, for one selection.

Nodes run in the order opposite to forward's. A kept value goes after its last reader; so does what
a recomputed one starts from. A recomputed value is there from the first node that asks for it, or
for what is computed from it, until the last; what only others are made from goes at once, before
the node itself runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from stepscope.fix.saved.encoding_names import OFFLOAD
from stepscope.fix.saved.offload_offers import offload_points
from stepscope.fix.saved.replay_order import ReplayOrder
from stepscope.fix.saved.selection import held_anyway, is_planned

if TYPE_CHECKING:
    from collections.abc import Container

    from stepscope.fix.saved.selection import ValueSelection
    from stepscope.fix.saved.step_record import StepRecord


@dataclass(frozen=True, slots=True)
class BackwardMemory:
    """`saved_bytes` when backward begins; `peak_bytes` at any time of it. The levels are those at
    each node, and at the end: what is kept as it is, kept in an encoding, back from host memory
    (offloaded), made again, and what passes while that is made."""

    saved_bytes: int
    peak_bytes: int
    kept_levels: tuple[int, ...] = ()
    encoded_levels: tuple[int, ...] = ()
    offload_levels: tuple[int, ...] = ()
    again_levels: tuple[int, ...] = ()
    passing_levels: tuple[int, ...] = ()
    gone_after: tuple[int, ...] = ()  # of the first four, what nothing after the node reads
    outputs_bytes: int = 0  # of the pass, that are not kept: there as long as the loss is computed

    @property
    def loss_level(self) -> int:
        """When forward is over, before the first node reads anything."""
        return self.saved_bytes + self.outputs_bytes

    @property
    def levels(self) -> tuple[int, ...]:
        """While each node runs."""
        parts = self.kept_levels, self.encoded_levels, self.offload_levels, self.again_levels
        return tuple(map(sum, zip(*parts, strict=True)))

    @property
    def replay_levels(self) -> tuple[int, ...]:
        """The most before that, while what it reads is made again."""
        return tuple(map(sum, zip(self.levels, self.passing_levels, strict=True)))

    @property
    def after_levels(self) -> tuple[int, ...]:
        """When it has run, before the next reads anything."""
        return tuple(a - b for a, b in zip(self.levels, self.gone_after, strict=True))


@dataclass(slots=True)
class _HeldBytes:
    """Bytes that come and go with the nodes of backward."""

    change: list[int]
    gone: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.gone = [0] * len(self.change)

    def held(self, size_bytes: int, until: int) -> None:
        self.there(size_bytes, 0, until)

    def there(self, size_bytes: int, begins: int, until: int) -> None:
        self.change[begins] += size_bytes
        self.change[until + 1] -= size_bytes
        self.gone[until + 1] += size_bytes

    def at_nodes(self) -> tuple[int, ...]:
        return tuple(accumulate(self.change))

    def gone_after(self) -> list[int]:
        """Bytes that go when each node has run."""
        return [*self.gone[1:], 0]


@dataclass(slots=True)
class _ValueLives:
    """When each value is made again and read; times count the nodes of backward."""

    again: ReplayOrder
    read: dict[int, int] = field(default_factory=dict)
    held_until: dict[int, int] = field(default_factory=dict)  # by any node that may ask for it
    readers: dict[int, set[int]] = field(default_factory=dict)  # replay for a node, or the node
    asked: dict[int, set[int]] = field(default_factory=dict)  # nodes that read it themselves

    def reads(self, value: int, at: int) -> None:
        self.read[value] = max(self.read.get(value, 0), at)
        self.readers.setdefault(value, set()).add(at)

    def asks(self, value: int, at: int) -> None:
        self.reads(value, at)
        self.asked.setdefault(value, set()).add(at)

    def holds(self, value: int, at: int) -> None:
        self.held_until[value] = max(self.held_until.get(value, 0), at)


def backward_memory(record: StepRecord, selection: ValueSelection) -> BackwardMemory:
    times, anyway = node_times(record), held_anyway(record)
    last = max(times, default=0) + 1
    kept, encoded, offload, again, passing = (_HeldBytes([0] * (last + 2)) for _ in range(5))
    kept.held(sum(anyway.values()), last)
    for number, use in enumerate(record.uses):
        if use.value is None or record.values[use.value].owned:
            continue
        if number in selection.encoded_uses:
            encoded.held(selection.encoded_uses[number].held_bytes, times[number])
    lives = _lives(record, selection, times)
    for value, until in lives.held_until.items():
        known = record.values[value]
        if known.storage in anyway:
            continue
        if value in selection.encoded:
            encoded.held(selection.encoded[value].held_bytes, until)
            if selection.encoded[value].encoding != OFFLOAD:
                for at in lives.asked.get(value, ()):
                    again.there(known.size_bytes, at, at)  # decoded
        elif value in selection.kept:
            kept.held(known.size_bytes, until)
    for value, (arrives, until) in _fetched(record, selection, lives, times).items():
        offload.there(record.values[value].size_bytes, arrives, until)
    _add_made_again(again, passing, record, lives)
    saved_bytes = kept.change[0] + encoded.change[0]
    gone = [one.gone_after() for one in (kept, encoded, offload, again)]
    memory = BackwardMemory(
        saved_bytes=saved_bytes,
        peak_bytes=saved_bytes,
        kept_levels=kept.at_nodes(),
        encoded_levels=encoded.at_nodes(),
        offload_levels=offload.at_nodes(),
        again_levels=again.at_nodes(),
        passing_levels=passing.at_nodes(),
        gone_after=tuple(map(sum, zip(*gone, strict=True))),
        outputs_bytes=_given_up_outputs(record, selection, anyway),
    )
    return replace(memory, peak_bytes=max(saved_bytes, *memory.replay_levels))


def _given_up_outputs(record: StepRecord, selection: ValueSelection, anyway: Container[int]) -> int:
    """Bytes of outputs that backward kept, and keeps no longer."""
    values = record.values
    kept = {values[value].storage for value in selection.kept}
    saved = {use.value for use in record.uses}
    outputs = [values[value] for value in record.outputs if value in saved]
    given_up = {
        output.storage: output.size_bytes
        for output in outputs
        if output.storage not in kept and output.storage not in anyway
    }
    return sum(given_up.values())


def _add_made_again(
    again: _HeldBytes, passing: _HeldBytes, record: StepRecord, lives: _ValueLives
) -> None:
    for node, replayed in lives.again.bytes_at(lives.read):
        again.there(replayed.asked_bytes, node, node)
        passing.there(replayed.most_bytes - replayed.left_bytes, node, node)
    for value, made in lives.again.made.items():
        if lives.read[value] > made:
            again.there(record.values[value].size_bytes, made, lives.read[value])


def _fetched(
    record: StepRecord, selection: ValueSelection, lives: _ValueLives, times: list[int]
) -> dict[int, tuple[int, int]]:
    """When offloaded values are on the device again: fetched ahead of their first reader."""
    offloaded = [v for v, option in selection.encoded.items() if option.encoding == OFFLOAD]
    arrives = {
        value: min(times[points.fetch_at], *lives.readers.get(value, {0}))
        for value, points in offload_points(record, offloaded).items()
    }
    return {
        value: (arrives.get(value, 0), max(arrives.get(value, 0), lives.held_until.get(value, 0)))
        for value in offloaded
    }


def node_times(record: StepRecord) -> list[int]:
    """When each use is read. A node that was not met is taken to come last."""
    orders = sorted({use.order for use in record.uses if use.order is not None}, reverse=True)
    places = {order: place for place, order in enumerate(orders)}
    return [len(orders) if use.order is None else places[use.order] for use in record.uses]


def _lives(record: StepRecord, selection: ValueSelection, times: list[int]) -> _ValueLives:
    lives = _ValueLives(ReplayOrder(record, selection))
    by_time: dict[int, list[int]] = {}
    for number, use in enumerate(record.uses):
        if is_planned(record, use) and number not in selection.encoded_uses:
            by_time.setdefault(times[number], []).append(number)
    for time in sorted(by_time):
        for number in by_time[time]:
            value = record.uses[number].value
            if value is not None:
                lives.asks(value, time)
                lives.holds(value, time)
                for source in lives.again.ask(value, time):
                    lives.reads(source, time)
    # Later nodes that ask for a result also hold what it starts from.
    for number in sorted(selection.repeated, reverse=True):
        call = record.operators[number]
        until = max((lives.held_until.get(value, 0) for value in call.outputs), default=0)
        for value in call.inputs:
            lives.holds(value, until)
    return lives
