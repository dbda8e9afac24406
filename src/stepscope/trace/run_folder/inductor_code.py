"""Read the code that Inductor wrote for a graph, and find which operators of the graph each
of its kernels computes, by following the tensors.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stepscope.records.compiled import GRAPH_VIEWS, GraphKernel, GraphOperator
from stepscope.records.dtypes import NAME_BYTES
from stepscope.trace.run_folder.graph_text import (
    placeholders,
    read_graph,
    returned_nodes,
    split_arguments,
)

# Inductor's C++ has no comments about that, and a Triton kernel that is called many times has one
# for its first call only. But graph and code have the same inputs and return the same tensors in
# the same order, and a library's call takes the operands of its node. So many tensors of the code
# are known nodes of the graph. A loop computes what lies between the nodes that it reads and those
# it writes.


def read_kernels(graph_text: str, code: str) -> tuple[GraphKernel, ...]:
    """Calls in their order, with the nodes of the graph that each computes."""
    inputs = placeholders(graph_text)
    read = read_code(code, inputs)
    operators = read_graph(graph_text)
    # Of each call; empty where it cannot be told.
    returned = returned_nodes(graph_text)
    join = _Join(operators, read)
    join.match_returned(returned)
    join.match_libraries()
    nodes = join.open_loops()
    kernels = []
    before: frozenset[str] = frozenset()  # tensors of the call before, if it is a loop
    for call, its_nodes in zip(read.calls, nodes, strict=True):
        is_loop = _LOOP.match(call.name) is not None
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


class _Join:
    """Nodes of a graph and tensors of its code."""

    def __init__(self, operators: Sequence[GraphOperator], code: InductorCode) -> None:
        self._code = code
        self._order = {one.node: place for place, one in enumerate(operators)}
        self._views = {
            one.node: one.inputs[0] for one in operators if one.name in GRAPH_VIEWS and one.inputs
        }
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
        """Return what a view is a view of."""
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
        """Return how many operands are the same on both sides; -1 if a known one differs."""
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
        # A loop that only copies into another layout works for the call that reads the copy.
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
                # The last reachable node of this size that others read.
                taken = set(self._node_of.values())
                size = self._code.sizes.get(name)
                same = [
                    node
                    for node in reachable
                    if self._inputs[node]
                    and node not in taken
                    and (size is None or self._operators[node].size_bytes in (None, size))
                ]
                outside = [node for node in same if set(self._users.get(node, ())) - reachable]
                node = max(outside or same, key=self._order.__getitem__, default=None)
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


# The code that Inductor wrote for a graph: the kernels it calls, and the tensors of each call.

_ALLOCATED = re.compile(
    r"^\s*(\w+) = empty_strided\w*\(\(([\d, ]*)\), \([^)]*\), (?:device='[^']*', dtype=)?"
    r"torch\.(\w+)"
)
_RENAMED = re.compile(r"^\s*(\w+) = (?:reinterpret_tensor\()?(\w+)(?:[;,\[]|$)")
_SOURCE = re.compile(r"#\s*(?:Topologically Sorted )?Source Nodes: \[([^\]]*)\]")
_FRAGMENT = re.compile(r"^#\s+%(\w+)\s.*call_function\[")
_DEFINED = re.compile(r"^(triton_\w+|cpp_fused_\w+) = async_compile\.")
_CPP_BEGINS = re.compile(r'^extern "C"\s+void\s+\w+\(')
_TRITON_BEGINS = re.compile(r"^def (triton_\w+)\((.*)\):")
_ANNOTATED = re.compile(r"(?<!:):(?!:)")
_PARAMETER = re.compile(r"(\w+)$")
_CALLED = re.compile(
    r"^\s*(?:(\w+) = )?((?:triton|cpp|multi_kernel)_\w+(?:\.run)?|extern_kernels\.\w+|"
    r"torch\.ops\.[\w.]+|"
    r"aten\.[\w.]+|inductor_ops\.[\w.]+)\((.*)\)"
)
_RETURNED = re.compile(r"^\s+return \((.*?),?\s*\)\s*$")
_ENDS = ("def get_args(", "def benchmark_compiled_module(")
_TENSOR = re.compile(r"\b(?:reinterpret_tensor\(\s*)?([A-Za-z_]\w*)")
_KEYWORD = re.compile(r"^([A-Za-z_]\w*)\s*=(?!=)\s*(.*)$")
_WORD = re.compile(r"\b[a-z]\w*\b")
_LOOP = re.compile(r"triton_(?:poi|red|per|for|mix|split_scan)_|cpp_fused_|cpp_\w+_fused_")
_OPERATOR = re.compile(r"(?:extern_kernels|aten|inductor_ops|torch\.ops\.(?P<space>\w+))\.(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeCall:
    """One call, with the names of its tensors as the code has them."""

    name: str
    is_loop: bool  # written by Inductor: it may compute many operators
    operator: str | None  # of a library's: aten::mm
    reads: tuple[str, ...]  # each once, in the order of the arguments
    writes: tuple[str, ...]
    wholes: tuple[str, ...] = ()  # tensors of which it writes a part
    nodes: tuple[str, ...]  # as the code's comments say; of a kernel's first call only
    tensors: frozenset[str]
    size_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InductorCode:
    """Calls in their order, what the code returns, and names that are the same tensor."""

    calls: tuple[CodeCall, ...] = ()
    returned: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)  # a name -> the one before
    same: dict[str, str] = field(default_factory=dict)  # whole tensors: a name -> the first one
    sizes: dict[str, int] = field(default_factory=dict)  # bytes by name


def read_code(code: str, inputs: dict[str, int]) -> InductorCode:
    """`inputs` are the bytes of the graph's inputs, by name."""
    reading = _Reading(inputs)
    for line in code.splitlines():
        if line.startswith(_ENDS):
            break
        reading.take(line)
    return InductorCode(
        calls=tuple(reading.calls),
        returned=reading.returned,
        renamed=reading.renamed,
        same=reading.same,
        sizes=reading.sizes,
    )


class _Reading:
    """What is known at one line of the code."""

    def __init__(self, inputs: dict[str, int]) -> None:
        self.calls: list[CodeCall] = []
        self.returned: tuple[str, ...] = ()
        self.renamed: dict[str, str] = {}
        self.same: dict[str, str] = {}
        self.sizes = dict(inputs)
        self._parts: dict[str, str] = {}  # where kernels write parts of one tensor -> that one
        self._computed: dict[str, tuple[str, ...]] = {}
        self._parameters: dict[str, tuple[str, ...]] = {}
        self._nodes: tuple[str, ...] = ()
        self._fragment: list[str] = []
        self._defining: str | None = None  # a C++ kernel whose parameters come next
        self._signature: str | None = None  # as far as it has been read

    def take(self, line: str) -> None:
        if self._signature is not None or _CPP_BEGINS.match(line):
            self._take_signature(line)
        elif source := _SOURCE.search(line):
            words = (word.strip() for word in source[1].split(","))
            self._nodes, self._fragment = tuple(word for word in words if word), []
        elif part := _FRAGMENT.match(line):
            self._fragment.append(part[1])
        elif defined := _DEFINED.match(line):
            self._defining = defined[1]
            self._computed[defined[1]] = tuple(self._fragment)
            self._nodes, self._fragment = (), []
        elif triton := _TRITON_BEGINS.match(line):
            self._parameters[triton[1]] = _names_of_parameters(triton[2])
        elif called := _CALLED.match(line):
            self._call(called[2].removesuffix(".run"), called[3], called[1])
        elif made := _ALLOCATED.match(line):
            self.sizes[made[1]] = _bytes(made[2], made[3])
        elif renamed := _RENAMED.match(line):
            self._rename(renamed[1], renamed[2], line)
        elif returned := _RETURNED.match(line):
            self.returned = tuple(_tensor(word) or "" for word in split_arguments(returned[1]))

    def _take_signature(self, line: str) -> None:
        """Take the signature of a C++ kernel: one parameter a line."""
        whole = (self._signature or "") + line
        self._signature = whole
        if ")" in line:
            self._signature = None
            if self._defining is not None:
                inside = whole.partition("(")[2].partition(")")[0]
                self._parameters[self._defining] = _names_of_parameters(inside)

    def _call(self, name: str, arguments: str, result: str | None) -> None:
        words = dict.fromkeys(_WORD.findall(arguments))
        tensors = frozenset(word for word in words if word in self.sizes)
        is_loop = name.startswith(("triton_", "cpp_", "multi_kernel_"))
        parameters = self._parameters.get(name, ())
        reads, writes = _roles(arguments, parameters, is_loop=is_loop)
        writes = [result] if result else writes
        self.calls.append(
            CodeCall(
                name=name,
                is_loop=is_loop,
                operator=None if is_loop else _operator(name),
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(dict.fromkeys(writes)),
                wholes=tuple({self._parts[one]: None for one in writes if one in self._parts}),
                nodes=self._computed.get(name, ()) if is_loop else (),
                tensors=tensors,
                size_bytes=sum(self.sizes[one] for one in tensors) if tensors else None,
            )
        )
        self._nodes = ()

    def _rename(self, name: str, old: str, line: str) -> None:
        """A view may be another tensor in the memory of one that is no longer needed."""
        if "# alias" in line:
            self._parts[name] = old
            return
        self.renamed.setdefault(name, old)
        if old in self.sizes and name not in self.sizes:
            self.sizes[name] = self.sizes[old]
            if "reinterpret_tensor(" not in line:
                self.same[name] = self.same.get(old, old)


def _roles(
    arguments: str, parameters: tuple[str, ...], *, is_loop: bool
) -> tuple[list[str], list[str]]:
    """Names that a call reads and writes. Parameters are called in_ptr0, out_ptr0, in_out_ptr0."""
    reads: list[str] = []
    writes: list[str] = []
    for place, argument in enumerate(split_arguments(arguments)):
        keyword = _KEYWORD.match(argument)
        name = _tensor(keyword[2] if keyword else argument)
        if name is None or (keyword and is_loop):
            continue
        role = parameters[place] if is_loop and place < len(parameters) else ""
        if role.startswith("out_ptr") or (keyword and keyword[1] == "out"):
            writes.append(name)
            continue
        reads.append(name)
        if role.startswith("in_out_ptr"):
            writes.append(name)
    return reads, writes


def _tensor(argument: str) -> str | None:
    """The name of a tensor or of what it is a view of; None for numbers, texts and tuples."""
    match = _TENSOR.match(argument)
    if match is None or match[1] in ("None", "True", "False", "torch", "device"):
        return None
    return match[1]


def _names_of_parameters(text: str) -> tuple[str, ...]:
    """List parameters of a C++ signature, where a type may be `at::BFloat16*`, or a Python one."""
    names = (_PARAMETER.search(_ANNOTATED.split(one)[0].strip()) for one in split_arguments(text))
    return tuple(name[1] for name in names if name)


def _operator(name: str) -> str | None:
    """`extern_kernels.bias_addmm` and `torch.ops.aten.mm.default` as a trace calls them."""
    match = _OPERATOR.match(name)
    if match is None:
        return None
    return f"{match['space'] or 'aten'}::{match[2].removeprefix('bias_')}"


def _bytes(dims: str, dtype: str) -> int:
    numbers = [int(word) for word in dims.split(",") if word.strip()]
    return math.prod(numbers) * NAME_BYTES.get(dtype, 0)
