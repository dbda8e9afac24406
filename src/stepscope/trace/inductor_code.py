"""The code that Inductor wrote for a graph: which kernels it calls, and what each computes."""

from __future__ import annotations

import math
import re

from stepscope.records.compiled import GraphKernel

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
_CALLED = re.compile(
    r"^\s*(?:\w+ = )?(triton_\w+|cpp_\w+|extern_kernels\.\w+|torch\.ops\.[\w.]+)(?:\.run)?\((.*)\)"
)
_WORD = re.compile(r"\b[a-z]\w*\b")
_LOOP = re.compile(r"triton_(?:poi|red|per)_|cpp_fused_")


def read_kernels(code: str, inputs: dict[str, int]) -> tuple[GraphKernel, ...]:
    """Calls in their order. `inputs` are the bytes of the graph's inputs, by name."""
    reading = _Reading(inputs)
    for line in code.splitlines():
        reading.take(line)
    return tuple(reading.kernels)


class _Reading:
    """What is known at one line of the code."""

    def __init__(self, inputs: dict[str, int]) -> None:
        self.kernels: list[GraphKernel] = []
        self._sizes = dict(inputs)
        self._same: dict[str, str] = {}  # names of one tensor
        self._computed: dict[str, tuple[str, ...]] = {}
        self._nodes: tuple[str, ...] = ()
        self._fragment: list[str] = []
        self._before: set[str] = set()  # tensors of the call before, if it is a loop

    def take(self, line: str) -> None:
        if source := _SOURCE.search(line):
            words = (word.strip() for word in source[1].split(","))
            self._nodes, self._fragment = tuple(word for word in words if word), []
        elif part := _FRAGMENT.match(line):
            self._fragment.append(part[1])
        elif defined := _DEFINED.match(line):
            self._computed[defined[1]] = tuple(self._fragment) or self._nodes
            self._nodes, self._fragment = (), []
        elif called := _CALLED.match(line):
            self._call(called[1], called[2])
        elif made := _ALLOCATED.match(line):
            self._sizes[made[1]] = _bytes(made[2], made[3])
        elif renamed := _RENAMED.match(line):
            self._rename(renamed[1], renamed[2], is_view="reinterpret_tensor(" in line)

    def _call(self, name: str, arguments: str) -> None:
        words = dict.fromkeys(_WORD.findall(arguments))
        tensors = {self._same.get(word, word) for word in words if word in self._sizes}
        is_loop = _LOOP.match(name) is not None
        shared = tensors & self._before if is_loop else set()
        self.kernels.append(
            GraphKernel(
                name=name.removesuffix(".run"),
                nodes=self._computed.get(name) or self._nodes,
                size_bytes=sum(self._sizes[one] for one in tensors) if tensors else None,
                shared_bytes=sum(self._sizes[one] for one in shared),
            )
        )
        self._nodes = ()
        self._before = tensors if is_loop else set()

    def _rename(self, name: str, old: str, *, is_view: bool) -> None:
        """A view may be another tensor in the memory of one that is no longer needed."""
        if old in self._sizes and name not in self._sizes:
            self._sizes[name] = self._sizes[old]
            if not is_view:
                self._same[name] = self._same.get(old, old)


def _bytes(dims: str, dtype: str) -> int:
    numbers = [int(word) for word in dims.split(",") if word.strip()]
    return math.prod(numbers) * _ITEM_BYTES.get(dtype, 0)
