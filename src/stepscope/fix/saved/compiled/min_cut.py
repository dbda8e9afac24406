"""A minimum cut that is solved again each time some capacities have grown."""

from __future__ import annotations

from collections import deque

UNBOUNDED = 1 << 62


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
