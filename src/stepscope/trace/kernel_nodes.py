"""Which operators of a graph each kernel computes, found by following the tensors.

Inductor's C++ has no comments about that, and a Triton kernel that is called many times has one for
its first call only. But graph and code have the same inputs and return the same tensors in the same
order, and a library's call takes the operands of its node. So many tensors of the code are known
nodes of the graph. A loop computes what lies between the nodes that it reads and those it writes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from stepscope.records.compiled import GraphKernel
from stepscope.trace.graph_text import placeholders, read_graph, returned_nodes
from stepscope.trace.inductor_code import is_element_loop, read_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stepscope.records.compiled import GraphOperator
    from stepscope.trace.inductor_code import CodeCall, InductorCode

_VIEWS = (
    "_reshape_alias _unsafe_view alias as_strided detach diagonal expand permute reshape select "
    "slice split split_with_sizes squeeze t transpose unbind unfold unsqueeze view view_as_real"
)
GRAPH_VIEWS = frozenset(f"aten::{word}" for word in _VIEWS.split())


def read_kernels(graph_text: str, code: str) -> tuple[GraphKernel, ...]:
    """Calls in their order, with the nodes of the graph that each computes."""
    inputs = placeholders(graph_text)
    read = read_code(code, inputs)
    operators = read_graph(graph_text)
    nodes = find_nodes(operators, returned_nodes(graph_text), read)
    kernels = []
    before: frozenset[str] = frozenset()  # tensors of the call before, if it is a loop
    for call, its_nodes in zip(read.calls, nodes, strict=True):
        is_loop = is_element_loop(call.name)
        tensors = frozenset(read.same.get(name, name) for name in call.tensors)
        kernels.append(
            GraphKernel(
                name=call.name,
                operator=call.operator,
                nodes=its_nodes,
                size_bytes=call.size_bytes,
                shared_bytes=sum(read.sizes[one] for one in tensors & before) if is_loop else 0,
            )
        )
        before = tensors if is_loop else frozenset()
    return tuple(kernels)


def find_nodes(
    operators: Sequence[GraphOperator], returned: Sequence[str], code: InductorCode
) -> list[tuple[str, ...]]:
    """Of each call; empty where it cannot be told."""
    join = _Join(operators, code)
    join.match_returned(returned)
    join.match_libraries()
    return join.open_loops()


class _Join:
    """Nodes of a graph and tensors of its code."""

    def __init__(self, operators: Sequence[GraphOperator], code: InductorCode) -> None:
        self._code = code
        self._order = {one.node: place for place, one in enumerate(operators)}
        self._views = {one.node: one.inputs[0] for one in operators if _is_view(one)}
        self._operators = {one.node: one for one in operators if one.node not in self._views}
        self._inputs = {
            node: tuple(dict.fromkeys(map(self._base, one.inputs)))
            for node, one in self._operators.items()
        }
        self._users: dict[str, list[str]] = defaultdict(list)
        for node, inputs in self._inputs.items():
            for name in inputs:
                self._users[name].append(node)
        # Constants and ranges, which every kernel makes for itself; seeds are a tensor.
        self._needs_nothing = [
            node
            for node, inputs in self._inputs.items()
            if not inputs and "seeds" not in self._operators[node].name
        ]
        self._node_of: dict[str, str] = {}  # a tensor of the code -> its node
        self._library: dict[int, str] = {}  # a call -> the node that it computes
        self._by_library = {node for node, one in self._operators.items() if "seeds" in one.name}
        self._maker = {
            name: call for call in reversed(code.calls) for name in (*call.writes, *call.wholes)
        }
        self._written = set(self._maker) | set(code.renamed)

    def _base(self, name: str) -> str:
        """What a view is a view of."""
        while name in self._views:
            name = self._views[name]
        return name

    def match_returned(self, returned: Sequence[str]) -> None:
        """The graph and its code return the same, in the same order."""
        if len(returned) != len(self._code.returned):
            return
        for node, name in zip(returned, self._code.returned, strict=True):
            base = self._base(node)
            if name and base in self._operators:
                self._node_of.setdefault(name, base)

    def match_libraries(self) -> None:
        """Each call of a library's operator and its node, in the order of both."""
        waiting: dict[str, dict[str, None]] = defaultdict(dict)
        for node, one in self._operators.items():
            waiting[one.name][node] = None
        for number, call in enumerate(self._code.calls):
            candidates = waiting.get(call.operator or "", {})
            fitting = self._best_fit(call, candidates)
            if fitting is None:
                continue
            del candidates[fitting]
            self._library[number] = fitting
            self._by_library.add(fitting)
            for name in call.writes:
                self._node_of.setdefault(name, fitting)
            for name, operand in zip(call.reads, self._inputs[fitting], strict=False):
                if operand in self._operators:
                    self._node_of.setdefault(name, operand)

    def _best_fit(self, call: CodeCall, candidates: Iterable[str]) -> str | None:
        """The first of those that share the most operands with the call."""
        most = sum(self._lookup(name) is not None for name in call.reads)
        best, shared = None, -1
        for node in candidates:
            fit = self._fit(call, node)
            if fit > shared:
                best, shared = node, fit
            if fit == most:
                break  # usually the first: both are in the same order
        return best

    def _fit(self, call: CodeCall, node: str) -> int:
        """How many operands are the same on both sides; -1 if a known one differs."""
        known = [self._lookup(name) for name in call.writes]
        if any(other is not None and other != node for other in known):
            return -1
        size = self._operators[node].size_bytes
        sizes = [self._code.sizes[name] for name in call.writes if name in self._code.sizes]
        if size is not None and sizes and sizes[0] != size:
            return -1
        same = 0
        for name, operand in zip(call.reads, self._inputs[node], strict=False):
            value = self._lookup(name)
            if value is None:
                # An input in another layout is a tensor that a loop wrote.
                if operand not in self._operators and not self._is_copy(name, operand):
                    return -1
            elif value != operand:
                return -1
            same += value == operand
        return same

    def _is_copy(self, name: str, of: str) -> bool:
        maker = self._maker.get(name)
        return maker is not None and maker.is_loop and of in maker.reads

    def _lookup(self, name: str) -> str | None:
        """The node of a tensor; an input of the graph is its own."""
        if name not in self._written:
            return name
        return self._node_of.get(name)

    def open_loops(self) -> list[tuple[str, ...]]:
        nodes: list[tuple[str, ...]] = []
        written: set[str] = set()
        assigned: set[str] = set()
        partial: dict[str, int] = {}  # a tensor that is no node -> the call that makes it
        reads_of: dict[int, set[str | None]] = {}
        for number, call in enumerate(self._code.calls):
            its: tuple[str, ...] = ()
            if not call.is_loop:
                its = (self._library[number],) if number in self._library else ()
            else:
                reads, parts = self._reads(call, written, partial, reads_of)
                reads_of[number] = reads
                its = tuple(self._open(call, reads, assigned, is_partial=None in reads))
                its = self._checked(its, call)
                for part in parts:
                    nodes[part] = nodes[part] or its
                if not its:
                    partial.update(dict.fromkeys(call.writes, number))
            nodes.append(its)
            assigned.update(its)
            written.update((*call.writes, *call.wholes))
        return self._with_copies(nodes)

    def _with_copies(self, nodes: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """A loop that only copies into another layout works for the call that reads the copy."""
        reader = {
            name: number
            for number, call in reversed(list(enumerate(self._code.calls)))
            for name in call.reads
        }
        for number in reversed(range(len(nodes))):
            call = self._code.calls[number]
            if nodes[number] or not call.is_loop:
                continue
            readers = [reader[name] for name in call.writes if name in reader]
            nodes[number] = next((nodes[one] for one in readers if one > number), ())
        return nodes

    def _reads(
        self,
        call: CodeCall,
        written: set[str],
        partial: dict[str, int],
        reads_of: dict[int, set[str | None]],
    ) -> tuple[set[str | None], list[int]]:
        """Nodes that a loop reads. What another loop began counts as that loop's own reads."""
        reads: set[str | None] = set()
        parts = []
        for name in call.reads:
            old = name
            while old not in written and old in self._code.renamed:
                old = self._code.renamed[old]
            if old in partial:
                parts.append(partial[old])
                reads |= reads_of[partial[old]]
            elif old in written or old not in self._written:
                reads.add(self._lookup(old))
        return reads, parts

    def _checked(self, nodes: tuple[str, ...], call: CodeCall) -> tuple[str, ...]:
        """The code's own comment is right about the first call: others compute the same kinds."""
        said = tuple(node for node in map(self._base, call.nodes) if node in self._operators)
        if not said:
            return nodes
        kinds = [Counter(self._operators[node].name for node in some) for some in (said, nodes)]
        return nodes if kinds[0] == kinds[1] else tuple(dict.fromkeys(said))

    def _open(
        self, call: CodeCall, reads: set[str | None], assigned: set[str], *, is_partial: bool
    ) -> Iterator[str]:
        """Nodes between those that the loop reads and those it writes, in the graph's order."""
        known_reads = {name for name in reads if name is not None}
        reachable = self._reachable(known_reads)
        written = []
        for name in (*call.writes, *call.wholes):
            node = self._node_of.get(name)
            if node is None and name not in call.wholes:
                node = self._guess(name, reachable, taken=set(self._node_of.values()))
            if node is not None:
                self._node_of.setdefault(name, node)
                written.append(node)
        stop = known_reads | self._by_library
        found = self._slice(written, stop)
        if is_partial or found - reachable:  # it reads something that is not known
            found = self._slice(written, stop | assigned)
        yield from sorted(found, key=self._order.__getitem__)

    def _reachable(self, reads: set[str]) -> set[str]:
        """Nodes that can be computed from these and from constants alone."""
        missing: dict[str, int] = {}
        found: set[str] = set()
        wave = [*reads, *self._needs_nothing]
        found.update(self._needs_nothing)
        while wave:
            for user in self._users.get(wave.pop(), ()):
                if user in found or user in self._by_library or user in reads:
                    continue
                left = missing.get(user, len(self._inputs[user])) - 1
                missing[user] = left
                if not left:
                    found.add(user)
                    wave.append(user)
        return found

    def _guess(self, name: str, reachable: set[str], taken: set[str]) -> str | None:
        """The last reachable node of this size that others read."""
        size = self._code.sizes.get(name)
        same = [
            node
            for node in reachable
            if self._inputs[node]
            and node not in taken
            and (size is None or self._operators[node].size_bytes in (None, size))
        ]
        outside = [node for node in same if set(self._users.get(node, ())) - reachable]
        return max(outside or same, key=self._order.__getitem__, default=None)

    def _slice(self, written: Iterable[str], stop: set[str]) -> set[str]:
        """All that these nodes need, back to where it stops."""
        found: set[str] = set()
        wave = [node for node in written if node in self._operators]
        while wave:
            node = wave.pop()
            if node in found:
                continue
            found.add(node)
            wave += [
                name for name in self._inputs[node] if name in self._operators and name not in stop
            ]
        return {node for node in found if node not in self._by_library}


def _is_view(operator: GraphOperator) -> bool:
    return operator.name in GRAPH_VIEWS and len(operator.inputs) >= 1
