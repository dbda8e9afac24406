"""Minimum cuts by Dinic's algorithm."""

from __future__ import annotations

from collections import deque

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
