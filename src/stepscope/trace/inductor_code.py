"""The code that Inductor wrote for a graph: the kernels it calls, and the tensors of each call."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from stepscope.trace.graph_text import split_arguments

_ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
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
        """Of a C++ kernel: one parameter a line."""
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


def is_element_loop(name: str) -> bool:
    """A loop over elements or a reduction, not a template of products."""
    return _LOOP.match(name) is not None


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
    """Of a C++ signature, where a type may be `at::BFloat16*`, or a Python one."""
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
    return math.prod(numbers) * _ITEM_BYTES.get(dtype, 0)
