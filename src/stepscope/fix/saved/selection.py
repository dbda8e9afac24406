"""Choose one way to treat every value of a step, by a minimum cut."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise

from stepscope.fix.saved.step_record import (
    HoldingOption,
    RecordedCall,
    SavedUse,
    StepRecord,
    StepValue,
)

# A value is a pair of nodes with its bytes between them: cut there, it is kept. An operator stands
# between its inputs and its outputs; the source feeds those that may not be repeated, and the
# others as much as repeating them costs. What backward needs runs into the sink, at the price of an
# encoding where one is enough. So a minimum cut weighs all of it at once, and a value that many
# recomputed ones start from is paid for once.
#
# Nothing is recomputed from one segment of the pass into a later one: a long chain would be there
# all at once. So the pass falls into many small networks, and layers that are alike are cut once.


@dataclass(slots=True)
class ValueSelection:
    """Values and operators by their place in the record; uses likewise."""

    kept: set[int] = field(default_factory=set)
    encoded: dict[int, HoldingOption] = field(default_factory=dict)  # values: how they are held
    repeated: set[int] = field(default_factory=set)  # operators
    encoded_uses: dict[int, HoldingOption] = field(default_factory=dict)


def is_planned(record: StepRecord, use: SavedUse) -> bool:
    """What the model owns is there anyway; what is overwritten cannot be read later."""
    if use.value is None:
        return False
    value = record.values[use.value]
    return not (value.owned or value.overwritten)


def held_anyway(record: StepRecord) -> dict[int, int]:
    """Bytes of the storages that stay whatever is chosen: backward reads a content of theirs that
    cannot be planned."""
    unplanned = [
        record.values[use.value]
        for use in record.uses
        if use.value is not None and not is_planned(record, use)
    ]
    return {value.storage: value.size_bytes for value in unplanned if not value.owned}


def keep_everything(record: StepRecord) -> ValueSelection:
    uses = [use for use in record.uses if is_planned(record, use)]
    return ValueSelection(kept={use.value for use in uses if use.value is not None})


@dataclass(frozen=True, slots=True)
class _Shape:
    """Costs, inputs and outputs of operators; capacity of values, whether they are there anyway,
    and capacities of their uses."""

    operators: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    values: tuple[tuple[int, bool, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class _CutSides:
    """`made` are values that are recomputed if anything needs them, `apart` those whose uses are
    encoded one by one."""

    bytes_per_ns: float
    made: frozenset[int]
    apart: frozenset[int]


class StepCuts:
    """The minimum cuts of one pass in so many segments, at any price of time. With `by_bytes` an
    operator takes as long as it moves bytes: where nothing limits time, measured ones would only
    make the search look elsewhere each time."""

    def __init__(self, record: StepRecord, segments: int, *, by_bytes: bool = False) -> None:
        self._record = record
        self._by_bytes = by_bytes
        self._held_anyway = held_anyway(record)
        self._length = max(1, -(-len(record.operators) // segments))
        self._uses: defaultdict[int, list[int]] = defaultdict(list)
        for number, use in enumerate(record.uses):
            if is_planned(record, use) and use.value is not None:
                self._uses[use.value].append(number)
        self._given: set[int] = set()  # values that are not recomputed
        self._parts = list(self._networks())
        self._cuts: dict[float, _CutSides] = {}

    def _networks(self) -> Iterator[tuple[list[int], list[int]]]:
        """Operators that may be repeated and values, as far as backward may need them; those that
        have nothing in common apart."""
        record, root = self._record, dict[int, int]()

        def find(value: int) -> int:
            while root.setdefault(value, value) != value:
                root[value] = value = root[root[value]]
            return value

        calls: dict[int, tuple[int, ...]] = {}
        crossing = self._crossing()
        waiting = list(self._uses)
        met = set(waiting)
        while waiting:
            value = waiting.pop()
            find(value)
            producer = record.values[value].producer
            if producer is None or value in crossing or record.operators[producer].refusal:
                self._given.add(value)
                continue
            call = record.operators[producer]
            inputs = tuple(one for one in call.inputs if not record.values[one].owned)
            calls[producer] = inputs
            for one in (*inputs, value):
                root[find(one)] = find(value)
                if one not in met:
                    met.add(one)
                    waiting.append(one)
        parts: dict[int, tuple[list[int], list[int]]] = {}
        for value in sorted(met):
            parts.setdefault(find(value), ([], []))[1].append(value)
        for number in sorted(calls):
            made = next(one for one in record.operators[number].outputs if one in root)
            parts[find(made)][0].append(number)
        yield from parts.values()

    def _crossing(self) -> set[int]:
        """Values that an operator of a later segment reads."""
        return {
            value
            for number, call in enumerate(self._record.operators)
            for value in call.inputs
            if (made := self._record.values[value].producer) is not None
            and made // self._length < number // self._length
        }

    def _cut(self, bytes_per_ns: float) -> _CutSides:
        known = self._cuts.get(bytes_per_ns)
        if known is None:
            sides: dict[_Shape, tuple[list[int], list[int]]] = {}
            made, apart = set[int](), set[int]()
            for calls, values in self._parts:
                shape = self._shape(calls, values, bytes_per_ns)
                if shape not in sides:
                    sides[shape] = _solved(shape)
                made.update(values[place] for place in sides[shape][0])
                apart.update(values[place] for place in sides[shape][1])
            known = _CutSides(bytes_per_ns, frozenset(made), frozenset(apart))
            self._cuts[bytes_per_ns] = known
        return known

    def _shape(self, calls: list[int], values: list[int], bytes_per_ns: float) -> _Shape:
        """A network without names: layers that are alike have the same."""
        places = {value: place for place, value in enumerate(values)}
        operators, capacities = [], []
        for number in calls:
            call = self._record.operators[number]
            inputs = tuple(places[one] for one in call.inputs if one in places)
            outputs = tuple(
                places[one] for one in call.outputs if one in places and one not in self._given
            )
            operators.append((self._repeat_cost(number, bytes_per_ns), inputs, outputs))
        for number in values:
            uses = tuple(
                self._option_of(self._record.uses[use].options, bytes_per_ns)[1]
                for use in self._uses.get(number, ())
            )
            capacity = self._capacity(self._record.values[number], bytes_per_ns)
            capacities.append((capacity, number in self._given, uses))
        return _Shape(tuple(operators), tuple(capacities))

    def _repeat_cost(self, number: int, bytes_per_ns: float) -> int:
        call, record = self._record.operators[number], self._record
        again = call.took_ns + (0 if record.slack_ns else record.repeat_ns)
        if self._by_bytes:
            again = moved_bytes(record, call)
        return max(1, round(again * bytes_per_ns))

    def _option_of(
        self, options: tuple[HoldingOption, ...], bytes_per_ns: float
    ) -> tuple[HoldingOption | None, int]:
        """The cheapest, and what it is worth."""
        price = 0.0 if self._by_bytes else bytes_per_ns
        option = min(options, key=lambda one: one.worth(price), default=None)
        return option, UNLIMITED if option is None else option.worth(price)

    def _capacity(self, value: StepValue, bytes_per_ns: float) -> int:
        if value.overwritten:
            return UNLIMITED
        if value.owned or value.storage in self._held_anyway:
            return 0
        return min(value.size_bytes, self._option_of(value.options, bytes_per_ns)[1])

    def select(self, bytes_per_ns: float, late: tuple[int, float] | None = None) -> ValueSelection:
        """`late` is an operator and the price from there on: where all layers are alike, one price
        treats all of them alike."""
        early = self._cut(bytes_per_ns)
        begins, end = (0, early) if late is None else (late[0], self._cut(late[1]))

        def cut_of(value: int) -> _CutSides:
            return end if (self._record.values[value].producer or 0) >= begins else early

        selection, waiting = ValueSelection(), list[int]()
        for value, uses in self._uses.items():
            cut = cut_of(value)
            for use in uses:
                option, _ = self._option_of(self._record.uses[use].options, cut.bytes_per_ns)
                if option is not None and value in cut.apart:
                    selection.encoded_uses[use] = option
                else:
                    waiting.append(value)
        met = set[int]()
        while waiting:  # only what some use really needs
            number = waiting.pop()
            if number not in met and not self._record.values[number].owned:
                met.add(number)
                waiting.extend(self._place(selection, number, cut_of(number)))
        return selection

    def _place(self, selection: ValueSelection, number: int, cut: _CutSides) -> tuple[int, ...]:
        """Add one needed value; returns what it is recomputed from."""
        value = self._record.values[number]
        if number in cut.made and value.producer is not None:
            selection.repeated.add(value.producer)
            return self._record.operators[value.producer].inputs
        option, worth = self._option_of(value.options, cut.bytes_per_ns)
        held = value.storage in self._held_anyway or value.overwritten
        if option is None or held or worth >= value.size_bytes:
            selection.kept.add(number)
        else:
            selection.encoded[number] = option
        return ()


def moved_bytes(record: StepRecord, call: RecordedCall) -> int:
    return sum(record.values[value].size_bytes for value in (*call.inputs, *call.outputs))


def select(record: StepRecord, *, bytes_per_ns: float, segments: int) -> ValueSelection:
    """One price for the whole pass."""
    return StepCuts(record, segments).select(bytes_per_ns)


def _solved(shape: _Shape) -> tuple[list[int], list[int]]:
    """Return the places of values that are recomputed, and of those that are not there."""
    network = FlowNetwork()
    source, sink = network.node(), network.node()
    before = [network.node() for _ in shape.values]
    after = [network.node() for _ in shape.values]
    for place, (capacity, given, uses) in enumerate(shape.values):
        if given:
            network.connect(source, before[place], UNLIMITED)
        network.connect(before[place], after[place], capacity)
        for room in uses:
            network.connect(after[place], sink, room)
    for cost, inputs, outputs in shape.operators:
        node = network.node()
        network.connect(source, node, cost)
        for place in inputs:
            network.connect(after[place], node, UNLIMITED)
        for place in outputs:
            network.connect(node, before[place], UNLIMITED)
    reached = network.source_side(source, sink)
    places = range(len(shape.values))
    made = [place for place in places if before[place] not in reached]
    return made, [place for place in places if after[place] in reached]


# Minimum cuts by Dinic's algorithm.

UNLIMITED = 1 << 62


class FlowNetwork:
    """Directed edges with integer capacities."""

    def __init__(self) -> None:
        self._room: list[dict[int, int]] = []  # by node: what is left of the way to each other

    def node(self) -> int:
        self._room.append({})
        return len(self._room) - 1

    def connect(self, start: int, end: int, capacity: int) -> None:
        self._room[start][end] = self._room[start].get(end, 0) + capacity
        self._room[end].setdefault(start, 0)

    def source_side(self, source: int, sink: int) -> set[int]:
        """The nodes on the source's side of a minimum cut, the smallest such set."""
        while True:
            levels, waiting = {source: 0}, deque([source])
            while waiting:
                node = waiting.popleft()
                for end, room in self._room[node].items():
                    if room and end not in levels:
                        levels[end] = levels[node] + 1
                        waiting.append(end)
            if sink not in levels:
                return set(levels)
            self._saturate(source, sink, levels)

    def _saturate(self, source: int, sink: int, levels: dict[int, int]) -> None:
        """Fill every shortest path; a path is walked without recursion."""
        ways = {node: iter(list(self._room[node])) for node in levels}
        path = [source]
        while path:
            node = path[-1]
            if node == sink:
                pairs = list(pairwise(path))
                most = min(self._room[start][end] for start, end in pairs)
                for start, end in pairs:
                    self._room[start][end] -= most
                    self._room[end][start] += most
                full = next(at for at, pair in enumerate(pairs) if not self._room[pair[0]][pair[1]])
                del path[full + 1 :]
                continue
            deeper = levels[node] + 1
            for end in ways[node]:
                if self._room[node][end] and levels.get(end) == deeper:
                    # The edge may have room for more paths: it is looked at again.
                    ways[node] = chain([end], ways[node])
                    path.append(end)
                    break
            else:
                path.pop()
                if path:
                    next(ways[path[-1]])  # a dead end
