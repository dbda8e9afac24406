"""How much memory one selection needs: what backward keeps and recomputes at each node, and
everything around it in a step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate

from stepscope.fix.saved.selection import ValueSelection, held_anyway, is_planned, keep_everything
from stepscope.fix.saved.step_record import StepRecord

# How much of what backward needs is there at once, for one selection.
#
# Nodes run in the order opposite to forward's. A kept value goes after its last reader; so does
# what a recomputed one starts from. A recomputed value is there from the first node that asks for
# it, or for what is computed from it, until the last; what only others are made from goes at once,
# before the node itself runs.


@dataclass(frozen=True, slots=True)
class BackwardMemory:
    """`saved_bytes` when backward begins; `peak_bytes` at any time of it."""

    saved_bytes: int
    peak_bytes: int
    levels: tuple[int, ...]  # while each node runs, and at the end
    replay_levels: tuple[int, ...]  # the most before that, while what it reads is made again
    outputs_bytes: int = 0  # of the pass, that are not kept: there as long as the loss is computed


def node_times(record: StepRecord) -> list[int]:
    """When each use is read. A node that was not met is taken to come last."""
    orders = sorted({use.order for use in record.uses if use.order is not None}, reverse=True)
    places = {order: place for place, order in enumerate(orders)}
    return [len(orders) if use.order is None else places[use.order] for use in record.uses]


@dataclass(slots=True)
class _NodeReplay:
    """At one node: values in the order in which they are made, and what each is made from."""

    made: list[int] = field(default_factory=list)
    read: list[tuple[int, ...]] = field(default_factory=list)
    asked_for: set[int] = field(default_factory=set)  # by the node itself: there until it ends


class BackwardModel:
    """Work out selections of one record."""

    def __init__(self, record: StepRecord) -> None:
        self._record = record
        self._sizes = [value.size_bytes for value in record.values]
        self._times = node_times(record)
        self._last = max(self._times, default=0) + 1
        self._anyway = held_anyway(record)
        self._planned = sorted(
            (time, number)
            for number, (use, time) in enumerate(zip(record.uses, self._times, strict=True))
            if is_planned(record, use)
        )

    def memory(self, selection: ValueSelection) -> BackwardMemory:
        record, sizes, last = self._record, self._sizes, self._last
        change, passing = [0] * (last + 2), [0] * (last + 2)

        def there(size_bytes: int, begins: int, until: int) -> None:
            change[begins] += size_bytes
            change[until + 1] -= size_bytes

        there(sum(self._anyway.values()), 0, last)
        for number, option in selection.encoded_uses.items():
            there(option.held_bytes, 0, self._times[number])
        replays, made_at = self._replays(selection)
        held_until = self._held_until(selection)
        for value, until in held_until.items():
            if record.values[value].storage in self._anyway:
                continue
            if value in selection.encoded:
                there(selection.encoded[value].held_bytes, 0, until)
            elif value in selection.kept:
                there(sizes[value], 0, until)
        saved_bytes = change[0]
        read = dict[int, int]()
        for node, replay in replays.items():
            for value in (*replay.asked_for, *(one for row in replay.read for one in row)):
                read[value] = max(read.get(value, 0), node)
        for node, replay in replays.items():
            decoded = sum(sizes[value] for value in replay.asked_for if value in selection.encoded)
            most, left, asked = self._replayed_bytes(replay, node, read, selection)
            there(asked + decoded, node, node)
            passing[node] += most - left
        for value, node in made_at.items():
            if read[value] > node:
                there(sizes[value], node, read[value])
        levels = tuple(accumulate(change))[: last + 1]
        replay_levels = tuple(a + b for a, b in zip(levels, passing, strict=False))
        return BackwardMemory(
            saved_bytes=saved_bytes,
            peak_bytes=max(saved_bytes, *replay_levels),
            levels=levels,
            replay_levels=replay_levels,
            outputs_bytes=self._given_up_outputs(selection),
        )

    def _replays(self, selection: ValueSelection) -> tuple[dict[int, _NodeReplay], dict[int, int]]:
        """What is made again at each node, and where each value is made."""
        values, operators = self._record.values, self._record.operators
        replays, made_at = dict[int, _NodeReplay](), dict[int, int]()
        held = selection.kept | selection.encoded.keys()

        def is_missing(value: int) -> bool:
            known = value in made_at or value in held
            return not known and values[value].producer in selection.repeated

        for node, number in self._planned:
            asked = self._record.uses[number].value
            if number in selection.encoded_uses or asked is None:
                continue
            replay = replays.setdefault(node, _NodeReplay())
            replay.asked_for.add(asked)
            waiting = [asked]
            while waiting:
                current = waiting[-1]
                if not is_missing(current):
                    waiting.pop()
                    continue
                inputs = operators[values[current].producer or 0].inputs
                missing = [one for one in inputs if is_missing(one)]
                if missing:
                    waiting.extend(missing)
                    continue
                made_at[current] = node
                replay.made.append(current)
                replay.read.append(inputs)
        return replays, made_at

    def _held_until(self, selection: ValueSelection) -> dict[int, int]:
        """By value: the last node that may ask for it, or for something that starts from it."""
        held_until = dict[int, int]()
        for node, number in self._planned:
            value = self._record.uses[number].value
            if number not in selection.encoded_uses and value is not None:
                held_until[value] = max(held_until.get(value, 0), node)
        for number in sorted(selection.repeated, reverse=True):
            call = self._record.operators[number]
            until = max((held_until.get(value, 0) for value in call.outputs), default=0)
            for value in call.inputs:
                held_until[value] = max(held_until.get(value, 0), until)
        return held_until

    def _replayed_bytes(
        self, replay: _NodeReplay, node: int, read: dict[int, int], selection: ValueSelection
    ) -> tuple[int, int, int]:
        """The most that is there while it is made, what is left of it, and that for this node
        alone. What is encoded is decoded for each operator that reads it."""
        if not replay.made:
            return 0, 0, 0
        sizes, encoded = self._sizes, selection.encoded
        last_reader = {value: at for at, row in enumerate(replay.read) for value in row}
        leaving: dict[int, list[int]] = {}
        for value in replay.made:
            if read[value] <= node and value not in replay.asked_for:
                leaving.setdefault(last_reader.get(value, len(replay.made)), []).append(value)
        now = most = staying = 0
        for at, value in enumerate(replay.made):
            now += sizes[value]
            most = max(most, now + sum(sizes[one] for one in replay.read[at] if one in encoded))
            now -= sum(sizes[one] for one in leaving.get(at, ()))
            staying += sizes[value] if read[value] > node else 0
        return max(most, now), now, now - staying

    def _given_up_outputs(self, selection: ValueSelection) -> int:
        """Bytes of outputs that backward kept, and keeps no longer."""
        values = self._record.values
        kept = {values[value].storage for value in selection.kept} | self._anyway.keys()
        saved = {use.value for use in self._record.uses}
        outputs = {
            values[value].storage: values[value].size_bytes
            for value in self._record.outputs
            if value in saved
        }
        return sum(size for storage, size in outputs.items() if storage not in kept)


def backward_memory(record: StepRecord, selection: ValueSelection) -> BackwardMemory:
    return BackwardModel(record).memory(selection)


# A whole step's memory: what backward keeps, and everything around it.
#
# At the end of forward the allocator says what is held. Less what backward keeps, that stays
# through backward: weights, optimizer state, the batch, outputs. On top come the gradients of
# weights and what a node of backward works with. Before backward has run, that is taken to be the
# gradients of its operator's outputs and inputs; afterwards the allocator has told it.


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes beside what backward keeps. Per node of backward, as BackwardMemory's levels."""

    fixed_bytes: int  # at any batch: weights, optimizer state
    outputs_bytes: int  # of the pass, and what else it left behind; grows with the batch
    gradients: tuple[int, ...]  # of weights
    working: tuple[int | None, ...]  # of the node that runs; None: not read
    waiting: tuple[int | None, ...]  # of that, what is there before it runs
    loss_bytes: int | None = None  # of the loss, before the first node; None: not read

    def peak_bytes(self, memory: BackwardMemory, batch: float = 1.0) -> int:
        """Of forward and backward, at `batch` times the samples."""
        moments = ((memory.replay_levels, self.waiting), (memory.levels, self.working))
        highest = max(
            batch * (level + beyond) + gradients
            for levels, beyonds in moments
            for level, beyond, gradients in zip(levels, beyonds, self.gradients, strict=True)
            if beyond is not None
        )
        if self.loss_bytes is not None:
            after_forward = memory.saved_bytes + memory.outputs_bytes
            highest = max(highest, batch * (after_forward + self.loss_bytes))
        return round(self.fixed_bytes + batch * self.outputs_bytes + highest)


def step_memory(record: StepRecord) -> StepMemory | None:
    """None where torch keeps no account of its memory, as on CPUs."""
    around = record.surroundings
    if around is None:
        return None
    plain = backward_memory(record, keep_everything(record))
    nodes = len(plain.levels)
    outputs_bytes = max(0, around.ended_bytes - around.begun_bytes - plain.saved_bytes)
    gradients = tuple(round(around.gradient_bytes * (n + 1) / nodes) for n in range(nodes))
    working, waiting = _guessed_working(record, nodes), _guessed_working(record, nodes)
    loss_bytes = None
    if any(reading.use is not None for reading in record.readings):
        times, fixed = node_times(record), around.begun_bytes + outputs_bytes
        peaks, begun = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for reading in record.readings:
            if reading.use is None:
                after_forward = fixed + plain.saved_bytes + plain.outputs_bytes
                loss_bytes = max(loss_bytes or 0, reading.peak_bytes - after_forward)
                continue
            time = times[reading.use]
            others = fixed + gradients[time] + plain.levels[time]
            peaks[time].append(reading.peak_bytes - others)
            begun[time].append(reading.begun_bytes - others)
        working = [max(peaks[n]) if n in peaks else None for n in range(nodes)]
        waiting = [max(begun[n]) if n in begun else None for n in range(nodes)]
    return StepMemory(
        fixed_bytes=around.begun_bytes,
        outputs_bytes=outputs_bytes,
        gradients=gradients,
        working=tuple(working),
        waiting=tuple(waiting),
        loss_bytes=loss_bytes,
    )


def _guessed_working(record: StepRecord, nodes: int) -> list[int | None]:
    """Gradients of the inputs and outputs of the operator whose node runs."""
    working: list[int | None] = [0] * nodes
    for use, time in zip(record.uses, node_times(record), strict=True):
        for call in record.operators[max(0, use.after - 1) : use.after + 1]:
            known = [record.values[value] for value in {*call.inputs, *call.outputs}]
            size_bytes = sum(v.size_bytes for v in known if not v.owned and "float" in v.dtype)
            working[time] = max(working[time] or 0, size_bytes)
    return working
