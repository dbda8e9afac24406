"""Choose one way to treat every value of a step, by a minimum cut."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from stepscope.fix.saved.step_record import HoldingOption, SavedUse, StepRecord, StepValue, cheapest

# A value is a pair of nodes with its bytes between them: cut there, it is kept. An operator stands
# between its inputs and its outputs; the source feeds those that may not be repeated, and the
# others as much as repeating them costs. What backward needs runs into the sink, at the price of an
# encoding where one is enough. So a minimum cut weighs all of it at once, and a value that many
# recomputed ones start from is paid for once.


@dataclass(slots=True)
class ValueSelection:
    """Values and operators by their place in the record; uses likewise."""

    kept: set[int] = field(default_factory=set)
    encoded: dict[int, HoldingOption] = field(default_factory=dict)  # values: how they are held
    repeated: set[int] = field(default_factory=set)  # operators
    encoded_uses: dict[int, HoldingOption] = field(default_factory=dict)

    def changes_something(self) -> bool:
        return bool(self.repeated or self.encoded or self.encoded_uses)


def is_planned(record: StepRecord, use: SavedUse) -> bool:
    """What the model owns is there anyway; what is overwritten cannot be read later."""
    if use.value is None:
        return False
    value = record.values[use.value]
    return not (value.owned or value.overwritten or value.needed_again)


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
class _TimePrice:
    """What a nanosecond is worth, in bytes. Operators from a `late` one on may have another price:
    where all layers are alike, one price would treat all of them alike."""

    bytes_per_ns: float
    late: tuple[int, float] | None

    def at(self, ordinal: int) -> float:
        if self.late is not None and ordinal >= self.late[0]:
            return self.late[1]
        return self.bytes_per_ns


def select(
    record: StepRecord,
    *,
    bytes_per_ns: float,
    segments: int,
    late: tuple[int, float] | None = None,
) -> ValueSelection:
    """`late` is an operator and the price from there on. Nothing is recomputed from one of the
    `segments` of the pass into a later one: a long chain would be there all at once."""
    return _StepCut(record, _TimePrice(bytes_per_ns, late), segments).selection()


class _StepCut:
    def __init__(self, record: StepRecord, price: _TimePrice, segments: int) -> None:
        self._record = record
        self._price = price
        self._held_anyway = held_anyway(record)
        network = FlowNetwork()
        self._source, self._sink = network.node(), network.node()
        self._before = [network.node() for _ in record.values]
        self._after = [network.node() for _ in record.values]
        self._operators = [network.node() for _ in record.operators]
        fixed = _crossing(record, segments)
        readers = Counter(use.value for use in record.uses)
        for number, value in enumerate(record.values):
            self._add_value(network, number, value, number in fixed)
        for number, call in enumerate(record.operators):
            again_ns = call.again_ns + record.repeat_ns + record.launch_ns
            again_ns += record.replace_ns * sum(readers[value] for value in call.outputs)
            cost = UNLIMITED if call.refusal else max(1, round(again_ns * price.at(number)))
            network.connect(self._source, self._operators[number], cost)
            for value_number in call.inputs:
                network.connect(self._after[value_number], self._operators[number], UNLIMITED)
            for value_number in call.outputs:
                network.connect(self._operators[number], self._before[value_number], UNLIMITED)
        for use in record.uses:
            if is_planned(record, use) and use.value is not None:
                network.connect(self._after[use.value], self._sink, self._use_capacity(use))
        self._reached = network.source_side(self._source, self._sink)

    def _add_value(self, network: FlowNetwork, number: int, value: StepValue, fixed: bool) -> None:
        if value.producer is None or fixed:
            network.connect(self._source, self._before[number], UNLIMITED)
        network.connect(self._before[number], self._after[number], self._capacity(value))

    def _capacity(self, value: StepValue) -> int:
        if value.overwritten:
            return UNLIMITED
        if value.owned or value.storage in self._held_anyway:
            return 0
        price = self._price_of(value)
        option = cheapest(value.options, price)
        return min(value.size_bytes, (UNLIMITED if option is None else option.worth(price)))

    def _use_capacity(self, use: SavedUse) -> int:
        price = self._price.at(use.after)
        option = cheapest(use.options, price)
        return UNLIMITED if option is None else option.worth(price)

    def _price_of(self, value: StepValue) -> float:
        return self._price.at(value.producer or 0)

    def selection(self) -> ValueSelection:
        """Only what some use really needs."""
        selection = ValueSelection()
        waiting: list[int] = []
        for number, use in enumerate(self._record.uses):
            if not is_planned(self._record, use) or use.value is None:
                continue
            option = cheapest(use.options, self._price.at(use.after))
            if option is not None and self._after[use.value] in self._reached:
                selection.encoded_uses[number] = option
            else:
                waiting.append(use.value)
        met: set[int] = set()
        while waiting:
            number = waiting.pop()
            if number not in met:
                met.add(number)
                waiting.extend(self._place(selection, number))
        return selection

    def _place(self, selection: ValueSelection, number: int) -> tuple[int, ...]:
        """Add one needed value; returns what it is recomputed from."""
        value = self._record.values[number]
        if value.owned:
            return ()
        if self._before[number] in self._reached or value.producer is None:
            price = self._price_of(value)
            option = cheapest(value.options, price)
            held = value.storage in self._held_anyway
            if option is None or held or option.worth(price) >= value.size_bytes:
                selection.kept.add(number)
            else:
                selection.encoded[number] = option
            return ()
        selection.repeated.add(value.producer)
        return self._record.operators[value.producer].inputs


def _crossing(record: StepRecord, segments: int) -> set[int]:
    """Values that an operator of a later segment reads."""
    if segments <= 1:
        return set()
    length = -(-len(record.operators) // segments)
    return {
        value
        for number, call in enumerate(record.operators)
        for value in call.inputs
        if (made := record.values[value].producer) is not None and made // length < number // length
    }


# Minimum cuts by Dinic's algorithm.

UNLIMITED = 1 << 62


class FlowNetwork:
    """Directed edges with integer capacities."""

    def __init__(self) -> None:
        self._edges: list[list[int]] = []  # of each node: numbers of edges
        self._ends: list[int] = []
        self._left: list[int] = []  # capacity; edge e ^ 1 runs the other way

    def node(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def connect(self, start: int, end: int, capacity: int) -> None:
        for here, there, room in ((start, end, capacity), (end, start, 0)):
            self._edges[here].append(len(self._ends))
            self._ends.append(there)
            self._left.append(room)

    def source_side(self, source: int, sink: int) -> set[int]:
        """The nodes on the source's side of a minimum cut, the smallest such set."""
        while True:
            levels = self._levels(source)
            if levels[sink] < 0:
                return {node for node, level in enumerate(levels) if level >= 0}
            self._saturate(source, sink, levels)

    def _levels(self, source: int) -> list[int]:
        levels = [-1] * len(self._edges)
        levels[source] = 0
        waiting = deque([source])
        while waiting:
            node = waiting.popleft()
            for edge in self._edges[node]:
                end = self._ends[edge]
                if self._left[edge] and levels[end] < 0:
                    levels[end] = levels[node] + 1
                    waiting.append(end)
        return levels

    def _saturate(self, source: int, sink: int, levels: list[int]) -> None:
        """Fill every shortest path; a path is walked without recursion."""
        following = [0] * len(self._edges)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                room = min(self._left[edge] for edge in path)
                for edge in path:
                    self._left[edge] -= room
                    self._left[edge ^ 1] += room
                full = next(place for place, edge in enumerate(path) if not self._left[edge])
                node = self._ends[path[full] ^ 1]
                del path[full:]
                continue
            forward = self._next_edge(node, levels, following)
            if forward is not None:
                path.append(forward)
                node = self._ends[forward]
            elif path:
                following[self._ends[path[-1] ^ 1]] += 1
                node = self._ends[path.pop() ^ 1]
            else:
                return

    def _next_edge(self, node: int, levels: list[int], following: list[int]) -> int | None:
        edges = self._edges[node]
        while following[node] < len(edges):
            edge = edges[following[node]]
            if self._left[edge] and levels[self._ends[edge]] == levels[node] + 1:
                return edge
            following[node] += 1
        return None
