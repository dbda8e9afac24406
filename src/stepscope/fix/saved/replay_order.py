"""What is made again at each node of backward, and how much of it is there at once.

Replay makes one thing after the other, what it starts from first, and lets go of what nobody reads
any more. What is encoded is decoded for each operator that reads it. A sum and an activation behind
a norm are made with it: what lies between them is never there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stepscope.fix.saved.encoding_names import OFFLOAD
from stepscope.fix.saved.normalised_again import FUSED
from stepscope.fix.saved.selection import is_planned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepscope.fix.saved.selection import ValueSelection
    from stepscope.fix.saved.step_record import RecordedCall, StepRecord


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
