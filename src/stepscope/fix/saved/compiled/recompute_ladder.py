"""Find what to recompute: more and more values, the cheapest bytes first."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepscope.fix.saved.compiled.graph_memory import SimulatedStep, simulate
from stepscope.fix.saved.compiled.joint_graph import PLACEHOLDER, GraphValue, JointGraph
from stepscope.fix.saved.compiled.operator_costs import DeviceSpeed
from stepscope.records.change_values import MemoryTarget

UNBOUNDED = 1 << 62
_CUTS = 18
_SEGMENTS = (8, 32)  # of forward, whose borders are kept
_GRAIN = 1000  # capacities are bytes times this


@dataclass(frozen=True, slots=True)
class LadderStep:
    """A choice of values to recompute, and the step with it."""

    repeated: frozenset[GraphValue]
    step: SimulatedStep


def nested_choices(graph: JointGraph, held: set[GraphValue]) -> list[set[GraphValue]]:
    """Return groups of values; each prefix of the list is a choice, ever more is recomputed.

    For a price of time in bytes, a minimum cut finds the choice with the least sum of saved bytes
    and time. The choices for falling prices are nested; what two of them differ by falls into
    groups that do not depend on each other, which are added one by one: those of early layers
    first, because backward needs them last. Values in `held` are never recomputed.
    """
    choices = [set[GraphValue](), *reversed(_cuts(graph, held))]
    groups: list[set[GraphValue]] = []
    chosen: set[GraphValue] = set()
    for choice in choices:
        added = choice - chosen
        groups += sorted(_connected(added), key=_worth, reverse=True)
        chosen |= added
    return groups


def _worth(group: set[GraphValue]) -> int:
    """Return the order of magnitude of the bytes that a group frees for its time."""
    freed = sum(value.size_bytes for value in group if value.saved)
    cost_ns = sum(value.cost_ns for value in group)
    return round(4 * math.log2(max(1, freed) / max(1, cost_ns)))


def _cuts(graph: JointGraph, held: set[GraphValue]) -> list[set[GraphValue]]:
    """Return choices for rising prices of time."""
    values = _ancestors(graph)
    entry = {value: 2 + 2 * place for place, value in enumerate(values)}
    cut = GrowingCut(2 + 2 * len(values))
    priced: list[tuple[int, GraphValue]] = []
    for value in values:
        begin = entry[value]
        if value.repeatable and value not in held:
            priced.append((cut.connect(0, begin, 0), value))
        else:
            cut.connect(0, begin, UNBOUNDED)
        keeping = 0 if value.free else _GRAIN * value.size_bytes
        cut.connect(begin, begin + 1, keeping if value.keepable else UNBOUNDED)
        for source in dict.fromkeys(value.inputs):
            # Before rounding a value exists in its own kernel alone: who reads it there needs it
            # recomputed.
            raw = (source, value) in graph.raw
            cut.connect(entry[source] + (0 if raw else 1), begin, UNBOUNDED)
    for value in graph.saved:
        cut.connect(entry[value] + 1, 1, UNBOUNDED)
    # From prices at which everything is recomputed to prices at which nothing is.
    rates = [value.size_bytes / value.cost_ns for _edge, value in priced if value.cost_ns > 0]
    first_price, last_price = 0.02 * min(rates, default=1.0), 2 * max(rates, default=1.0)
    total_ns = sum(value.cost_ns for value in values)
    first_price = max(first_price, 0.05 * sum(v.size_bytes for v in graph.saved) / max(1, total_ns))
    ratio = (
        max(1.01, (last_price / first_price) ** (1 / _CUTS)) if last_price > first_price else 2.0
    )
    price, before = first_price, 0.0
    choices = []
    while price <= last_price:
        for edge, value in priced:
            grown = int(price * value.cost_ns * _GRAIN) - int(before * value.cost_ns * _GRAIN)
            cut.grow(edge, grown + (1 if not before else 0))
        first = cut.solve()
        choices.append({value for _edge, value in priced if not first[entry[value]]})
        before, price = price, price * ratio
    return choices


def _ancestors(graph: JointGraph) -> list[GraphValue]:
    waiting, seen = list(graph.saved), set(graph.saved)
    while waiting:
        for source in waiting.pop().inputs:
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return sorted(seen, key=lambda value: value.number)


def _connected(values: set[GraphValue]) -> list[set[GraphValue]]:
    """Split into parts that no input connects, in forward's order."""
    part: dict[GraphValue, set[GraphValue]] = {}
    for value in sorted(values, key=lambda one: one.number):
        merged = {value}
        for source in value.inputs:
            if source in values and part[source] is not merged:
                other = part[source]
                if len(other) > len(merged):
                    merged, other = other, merged
                merged |= other
                for member in other:
                    part[member] = merged
        merged.add(value)
        for member in merged:
            part[member] = merged
    unique = {id(group): group for group in part.values()}
    return sorted(unique.values(), key=lambda group: min(value.number for value in group))


def narrow_places(graph: JointGraph, segments: int) -> set[GraphValue]:
    """Return what forward carries from one segment to the next, where that is least.

    Recomputing across such a place would make all values before it at once.
    """
    values = [value for value in graph.forward if value.kind != PLACEHOLDER]
    total = sum(value.size_bytes for value in values if value.saved)
    ends: dict[int, list[GraphValue]] = {}
    alive, level, passed = dict[GraphValue, None](), 0, 0
    lowest: dict[int, tuple[int, set[GraphValue]]] = {}
    for value in values:
        for ended in ends.pop(value.number, ()):
            del alive[ended]
            level -= ended.size_bytes
        last = max((user.number for user in value.users), default=-1)
        if last > value.number:
            alive[value] = None
            level += value.size_bytes
            ends.setdefault(last, []).append(value)
        passed += value.size_bytes if value.saved else 0
        segment = passed * segments // max(1, total)
        if level and (segment not in lowest or level < lowest[segment][0]):
            lowest[segment] = (level, set(alive))
    carried = set[GraphValue]().union(*(values for _level, values in lowest.values()))
    return {value for value in carried if value.keepable}


class RecomputeLadder:
    """Choices in several orders, in each of which every choice recomputes more than the last."""

    def __init__(self, graph: JointGraph, speed: DeviceSpeed) -> None:
        self._graph, self._speed = graph, speed
        held = [set[GraphValue](), *(narrow_places(graph, count) for count in _SEGMENTS)]
        self._orders = [nested_choices(graph, values) for values in held]
        self._known: dict[tuple[int, int], LadderStep] = {}
        self.plain = self.at(0, 0).step

    def at(self, order: int, count: int) -> LadderStep:
        """Return the choice of the first `count` groups of an order."""
        if (order, count) not in self._known:
            repeated = set[GraphValue]().union(*self._orders[order][:count])
            step = simulate(self._graph, repeated, self._speed)
            self._known[order, count] = LadderStep(frozenset(repeated), step)
        return self._known[order, count]

    def choose(self, target: MemoryTarget, static_bytes: int) -> LadderStep:
        """Return the choice that meets the target in the least time, else the one nearest to it."""
        plain = self.plain
        slowdown = math.inf if target.max_slowdown is None else target.max_slowdown
        most_ns = plain.time_ns * (1 + slowdown)
        goals: list[Callable[[SimulatedStep], bool]] = []
        if target.reduce is not None:
            least = (1 - target.reduce) * plain.saved_bytes
            goals.append(lambda step: step.saved_bytes <= least)
        if target.budget_bytes is not None:
            room = target.budget_bytes - static_bytes
            goals.append(lambda step: step.peak_bytes <= room)
        if target.batch is not None:
            share = plain.peak_bytes / target.batch
            goals.append(lambda step: step.peak_bytes <= share)
        if slowdown < math.inf:
            self._search(lambda step: step.time_ns > most_ns)
        if goals:
            self._search(lambda step: all(goal(step) for goal in goals))
        elif slowdown == math.inf:
            self._search(lambda step: False)  # noqa: ARG005
        affordable = [known for known in self._known.values() if known.step.time_ns <= most_ns]
        meeting = [known for known in affordable if all(goal(known.step) for goal in goals)]
        if goals and meeting:
            return min(meeting, key=lambda known: (known.step.time_ns, known.step.peak_bytes))
        return min(affordable, key=lambda known: (known.step.peak_bytes, known.step.time_ns))

    def points(self, shares: Sequence[float], seconds: float) -> list[LadderStep]:
        """Return the lowest peak for each share of added time; the later ones may lack time."""
        end = time.monotonic() + seconds
        for share in shares:
            if time.monotonic() > end:
                break
            limit = self.plain.time_ns * (1 + share)
            self._search(lambda step: step.time_ns > limit)  # noqa: B023
        return [
            min(
                (
                    known
                    for known in self._known.values()
                    if known.step.time_ns <= self.plain.time_ns * (1 + share)
                ),
                key=lambda known: (known.step.peak_bytes, known.step.time_ns),
            )
            for share in shares
        ]

    def _search(self, passed: Callable[[SimulatedStep], bool]) -> None:
        """Look at choices around the first one for which `passed` holds."""
        for order, groups in enumerate(self._orders):
            low, high = 0, len(groups) + 1
            while high - low > max(1, len(groups) // 48):
                middle = (low + high) // 2
                if passed(self.at(order, middle).step):
                    high = middle
                else:
                    low = middle


class GrowingCut:
    """A flow network between vertex 0 (source) and vertex 1 (sink).

    Capacities only grow, so the flow found so far stays valid and `solve` adds to it: a whole
    series of cuts costs little more than its last one.
    """

    def __init__(self, vertices: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(vertices)]
        self._heads: list[int] = []
        self._room: list[int] = []  # what an edge can still carry; its reverse edge has number ^ 1

    def connect(self, tail: int, head: int, capacity: int) -> int:
        """Return the number of the new edge."""
        number = len(self._heads)
        self._heads += [head, tail]
        self._room += [capacity, 0]
        self._edges[tail].append(number)
        self._edges[head].append(number + 1)
        return number

    def grow(self, edge: int, by: int) -> None:
        self._room[edge] += by

    def solve(self) -> list[bool]:
        """Return for each vertex whether it is on the source's side of a minimum cut."""
        while True:
            levels = self._levels()
            if levels[1] < 0:
                return [level >= 0 for level in levels]
            self._saturate(levels)

    def _levels(self) -> list[int]:
        """Return each vertex's distance from the source, -1 where no room leads to it."""
        levels = [-1] * len(self._edges)
        levels[0] = 0
        waiting = deque([0])
        while waiting:
            vertex = waiting.popleft()
            for edge in self._edges[vertex]:
                head = self._heads[edge]
                if levels[head] < 0 and self._room[edge] > 0:
                    levels[head] = levels[vertex] + 1
                    waiting.append(head)
        return levels

    def _saturate(self, levels: list[int]) -> None:
        """Push flow along shortest paths until none is left (Dinic)."""
        edges, heads, room = self._edges, self._heads, self._room
        following = [0] * len(edges)  # the next edge to try at each vertex
        path: list[int] = []
        vertex = 0
        while True:
            if vertex == 1:
                amount = min(room[edge] for edge in path)
                for edge in path:
                    room[edge] -= amount
                    room[edge ^ 1] += amount
                # Go on from the first edge that is now full.
                cut = next(place for place, edge in enumerate(path) if room[edge] == 0)
                vertex = heads[path[cut] ^ 1]
                del path[cut:]
                continue
            tried = edges[vertex]
            while following[vertex] < len(tried):
                edge = tried[following[vertex]]
                if room[edge] > 0 and levels[heads[edge]] == levels[vertex] + 1:
                    break
                following[vertex] += 1
            if following[vertex] < len(tried):
                path.append(tried[following[vertex]])
                vertex = heads[path[-1]]
            elif path:
                vertex = heads[path.pop() ^ 1]
                following[vertex] += 1
            else:
                return
