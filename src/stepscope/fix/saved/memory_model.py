"""How much memory one selection needs: what backward keeps and recomputes at each node, and
everything around it in a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from stepscope.fix.saved.norm_recompute import FUSED
from stepscope.fix.saved.plan_load import offload_points
from stepscope.fix.saved.selection import ValueSelection, held_anyway, is_planned
from stepscope.fix.saved.step_record import OFFLOAD, RecordedCall, StepRecord, StepSurroundings

# How much of what backward needs is there at once, for one selection.
#
# Nodes run in the order opposite to forward's. A kept value goes after its last reader; so does
# what a recomputed one starts from. A recomputed value is there from the first node that asks for
# it, or for what is computed from it, until the last; what only others are made from goes at once,
# before the node itself runs.


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


# What is made again at each node of backward, and how much of it is there at once.
#
# Replay makes one thing after the other, what it starts from first, and lets go of what nobody
# reads any more. What is encoded is decoded for each operator that reads it. A sum and an
# activation behind a norm are made with it: what lies between them is never there.


@dataclass(frozen=True, slots=True)
class ReplayedBytes:
    """At one node of backward."""

    most_bytes: int  # at once, while it is made
    left_bytes: int  # when the node runs
    asked_bytes: int  # of these, for this node alone


@dataclass(slots=True)
class _NodeReplay:
    """At one node: values in the order in which they are made, and what each is made from."""

    made: list[int] = field(default_factory=list)
    read: list[tuple[int, ...]] = field(default_factory=list)
    asked_for: set[int] = field(default_factory=set)  # by the node itself: there until it ends

    def replayed_bytes(
        self,
        stays: Callable[[int], bool],
        size_of: Callable[[int], int],
        decoded_for: Callable[[tuple[int, ...]], int],
    ) -> ReplayedBytes:
        """`stays`: other nodes read it later. `decoded_for`: what an operator reads."""
        last_reader = {value: at for at, read in enumerate(self.read) for value in read}
        leaving: dict[int, list[int]] = {}
        for value in self.made:
            if not stays(value) and value not in self.asked_for:
                leaving.setdefault(last_reader.get(value, len(self.made)), []).append(value)
        there = most = 0
        for at, value in enumerate(self.made):
            there += size_of(value)
            most = max(most, there + decoded_for(self.read[at]))
            there -= sum(map(size_of, leaving.get(at, ())))
        staying = sum(size_of(value) for value in self.made if stays(value))
        return ReplayedBytes(max(most, there), there, there - staying)


class ReplayOrder:
    """Of one pass backward, whose nodes ask in turn."""

    def __init__(self, record: StepRecord, selection: ValueSelection) -> None:
        self._record = record
        self._selection = selection
        self._held = selection.kept | selection.encoded.keys()
        self._reads = _FusedReads(record, selection)
        self._nodes: dict[int, _NodeReplay] = {}
        self.made: dict[int, int] = {}  # values: the node they are made at

    def ask(self, value: int, node: int) -> Iterator[int]:
        """The values that are read to make this one, unless it is there."""
        replay = self._nodes.setdefault(node, _NodeReplay())
        replay.asked_for.add(value)
        waiting = [value]
        while waiting:
            current = waiting[-1]
            if not self._is_missing(current):
                waiting.pop()
                continue
            read = self._reads.of(self._record.values[current].producer)
            missing = [one for one in read if self._is_missing(one)]
            if missing:
                waiting.extend(missing)
                continue
            self.made[current] = node
            replay.made.append(current)
            replay.read.append(read)
            yield from read

    def _is_missing(self, value: int) -> bool:
        if value in self.made or value in self._held:
            return False
        return self._record.values[value].producer in self._selection.repeated

    def bytes_at(self, last_read: dict[int, int]) -> Iterator[tuple[int, ReplayedBytes]]:
        """For each node that makes something."""
        values = self._record.values
        for node, replay in self._nodes.items():
            if replay.made:
                yield (
                    node,
                    replay.replayed_bytes(
                        lambda value, node=node: last_read[value] > node,  # type: ignore[misc]
                        lambda value: values[value].size_bytes,
                        self._decoded_bytes,
                    ),
                )

    def _decoded_bytes(self, read: tuple[int, ...]) -> int:
        encoded = self._selection.encoded
        decoded = (one for one in read if one in encoded and encoded[one].encoding != OFFLOAD)
        return sum(self._record.values[one].size_bytes for one in decoded)


class _FusedReads:
    """What repeated operators read, those that are made with a norm before them included: as
    replay decides."""

    def __init__(self, record: StepRecord, selection: ValueSelection) -> None:
        self._record = record
        self._repeated = selection.repeated
        self._held = selection.kept | selection.encoded.keys()
        self._readers = _readers(record, selection)
        self._known: dict[int, tuple[int, ...]] = {}

    def of(self, number: int | None) -> tuple[int, ...]:
        if number is None:
            return ()
        known = self._known.get(number)
        if known is None:
            call = self._record.operators[number]
            fused = self._fused(call) if call.again == FUSED else None
            known = self._known[number] = call.inputs if fused is None else fused
        return known

    def _fused(self, call: RecordedCall) -> tuple[int, ...] | None:
        """None where it is repeated alone."""
        inputs = call.inputs
        if len(inputs) == 1:
            before = self._absorbed(inputs[0])
            if before is None:
                return None
            if before.again != FUSED:
                return before.inputs if before.again is not None else None
            return self._sum(before)
        return self._sum(call)

    def _sum(self, call: RecordedCall) -> tuple[int, ...] | None:
        inputs = call.inputs
        for one, other in (inputs, inputs[::-1]) if len(inputs) == 2 else ():
            norm = self._absorbed(one)
            if norm is not None and norm.again not in (None, FUSED):
                return (*norm.inputs, other)
        return None

    def _absorbed(self, value: int) -> RecordedCall | None:
        """The operator that made it, if nobody else reads its results."""
        producer = self._record.values[value].producer
        if producer not in self._repeated or value in self._held:
            return None
        assert producer is not None
        return self._record.operators[producer] if self._readers[producer] == 1 else None


def _readers(record: StepRecord, selection: ValueSelection) -> Counter[int]:
    """By repeated operator: how many repeated operators and saved tensors read its results."""
    held = selection.kept | selection.encoded.keys()

    def maker(value: int) -> int | None:
        return None if value in held else record.values[value].producer

    readers: Counter[int] = Counter()
    for number in selection.repeated:
        readers.update({m for v in record.operators[number].inputs if (m := maker(v)) is not None})
    for number, use in enumerate(record.uses):
        if use.value is None or number in selection.encoded_uses or not is_planned(record, use):
            continue
        producer = maker(use.value)
        if producer is not None:
            readers[producer] += 1
    return readers


# A whole step's memory: what backward keeps, and everything around it.
#
# At the end of forward the allocator says what is held. Less what backward keeps, that stays
# through backward: weights, optimizer state, the batch, outputs. On top come the gradients of
# weights, each from the last operator that reads its weight on, and what a node of backward works
# with. Before backward has run, that is taken to be the gradients of its operator's outputs and
# inputs; afterwards the allocator has told it. What a node reads is made again before it works:
# what passes meanwhile stands beside the gradients that wait for the node, not beside all that it
# works with. Nodes that read nothing, such as sums of gradients, run when what the last one read
# has gone.


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes beside what backward keeps. Per node of backward, as BackwardMemory's levels."""

    fixed_bytes: int  # at any batch: weights, optimizer state
    outputs_bytes: int  # of the pass, and what else it left behind; grows with the batch
    gradients: tuple[int, ...]  # of weights
    working: tuple[int | None, ...]  # of the node that runs; grows with the batch; None: not read
    waiting: tuple[int | None, ...]  # of that, what is there before it runs
    following: tuple[int | None, ...]  # what others work with until the next node reads something
    loss_bytes: int | None = None  # of the loss, before the first node; None: not read

    def peak_bytes(self, memory: BackwardMemory, batch: float = 1.0) -> int:
        """Of forward and backward, at `batch` times the samples."""
        moments = (
            (memory.replay_levels, self.waiting),
            (memory.levels, self.working),
            (memory.after_levels, self.following),
        )
        highest = max(
            batch * (level + beyond) + gradients
            for levels, beyonds in moments
            for level, beyond, gradients in zip(levels, beyonds, self.gradients, strict=True)
            if beyond is not None
        )
        if self.loss_bytes is not None:
            highest = max(highest, batch * (memory.loss_level + self.loss_bytes))
        return round(self.fixed_bytes + batch * self.outputs_bytes + highest)


def step_memory(record: StepRecord, plain: BackwardMemory) -> StepMemory | None:
    """`plain` is what backward kept when the pass was recorded; None where torch keeps no account
    of its memory, as on CPUs."""
    around = record.surroundings
    if around is None:
        return None
    # For every node of backward, the place of its operator in forward; and one for the end.
    places: dict[int, int] = {}
    for use, time in zip(record.uses, node_times(record), strict=True):
        places[time] = max(places.get(time, 0), use.after)
    ordinals = [len(record.operators)] * (max(places, default=0) + 3)
    for time in range(len(ordinals)):
        ordinals[time] = places.get(time, ordinals[time - 1] if time else len(record.operators))
    ordinals[-2:] = [0, 0]
    # Gradients of the inputs and of the outputs of the operator whose node runs.
    sizes = [0] * (len(record.operators) + 1)
    for number, call in enumerate(record.operators):
        known = [record.values[value] for value in {*call.inputs, *call.outputs}]
        sizes[number] = sum(v.size_bytes for v in known if not v.owned and "float" in v.dtype)
    working = tuple(max(sizes[place], sizes[max(0, place - 1)]) for place in ordinals)
    guessed = StepMemory(
        fixed_bytes=around.begun_bytes,
        outputs_bytes=max(0, around.ended_bytes - around.begun_bytes - plain.saved_bytes),
        gradients=_gradients(record, around, ordinals),
        working=working,
        waiting=working,
        following=(None,) * len(working),
    )
    return _as_read(record, guessed, plain) if record.backward_was_read else guessed


def _as_read(record: StepRecord, guessed: StepMemory, plain: BackwardMemory) -> StepMemory:
    """Nodes work with what was allocated beyond everything else that is known."""
    times, levels, after_levels = node_times(record), plain.levels, plain.after_levels
    nothing: list[int | None] = [None] * len(levels)
    working, waiting, following = nothing.copy(), nothing.copy(), nothing.copy()
    loss_bytes: int | None = None
    for reading in record.backward_peaks:
        around_bytes = guessed.fixed_bytes + guessed.outputs_bytes
        if reading.use is None:  # nothing is made again yet
            beyond = reading.peak_bytes - around_bytes - plain.loss_level
            loss_bytes = _larger(loss_bytes, beyond)
            continue
        time = times[reading.use]
        others = around_bytes + guessed.gradients[time]
        working[time] = _larger(working[time], reading.peak_bytes - others - levels[time])
        if reading.begun_bytes is not None:
            before = reading.begun_bytes - others - levels[time]
            waiting[time] = _larger(waiting[time], before)
        if reading.after_bytes is not None:
            after = reading.after_bytes - others - after_levels[time]
            following[time] = _larger(following[time], after)
    before_nodes = [w if b is None else b for w, b in zip(working, waiting, strict=True)]
    return replace(
        guessed,
        working=tuple(working),
        waiting=tuple(before_nodes),
        following=tuple(following),
        loss_bytes=loss_bytes,
    )


def _larger(one: int | None, other: int) -> int:
    return other if one is None else max(one, other)


def _gradients(
    record: StepRecord, around: StepSurroundings, ordinals: Sequence[int]
) -> tuple[int, ...]:
    """Weights' gradients that were not there before, in the order in which they come."""
    last_reader: dict[int, int] = {}
    for number, call in enumerate(record.operators):
        for value in call.inputs:
            if record.values[value].owned:
                last_reader[value] = number
    owned_bytes = sum(record.values[value].size_bytes for value in last_reader)
    share = around.gradient_bytes / owned_bytes if owned_bytes else 0.0
    arriving = defaultdict[int, float](float)
    descending = [-ordinal for ordinal in ordinals]
    for value, number in last_reader.items():
        time = min(bisect_left(descending, -number), len(ordinals) - 1)
        arriving[time] += share * record.values[value].size_bytes
    held, levels = 0.0, []
    for time in range(len(ordinals)):
        held += arriving[time]
        levels.append(round(held))
    return tuple(levels)
