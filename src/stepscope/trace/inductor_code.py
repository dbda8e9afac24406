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


def read_kernels(code: str, inputs: dict[str, int]) -> tuple[GraphKernel, ...]:
    """Calls in their order. `inputs` are the bytes of the graph's inputs, by name."""
    sizes = dict(inputs)
    computed: dict[str, tuple[str, ...]] = {}
    kernels: list[GraphKernel] = []
    nodes: tuple[str, ...] = ()
    fragment: list[str] = []
    for line in code.splitlines():
        if source := _SOURCE.search(line):
            nodes = tuple(word.strip() for word in source[1].split(",") if word.strip())
            fragment = []
        elif part := _FRAGMENT.match(line):
            fragment.append(part[1])
        elif defined := _DEFINED.match(line):
            computed[defined[1]] = tuple(fragment) or nodes
            nodes, fragment = (), []
        elif called := _CALLED.match(line):
            name, arguments = called[1], called[2]
            kernels.append(
                GraphKernel(
                    name=name.removesuffix(".run"),
                    nodes=computed.get(name) or nodes,
                    size_bytes=_moved(arguments, sizes),
                )
            )
            nodes = ()
        elif made := _ALLOCATED.match(line):
            sizes[made[1]] = _bytes(made[2], made[3])
        elif (renamed := _RENAMED.match(line)) and renamed[2] in sizes:
            sizes.setdefault(renamed[1], sizes[renamed[2]])
    return tuple(kernels)


def _bytes(dims: str, dtype: str) -> int:
    numbers = [int(word) for word in dims.split(",") if word.strip()]
    return math.prod(numbers) * _ITEM_BYTES.get(dtype, 0)


def _moved(arguments: str, sizes: dict[str, int]) -> int | None:
    names = dict.fromkeys(_WORD.findall(arguments))
    known = [sizes[name] for name in names if name in sizes]
    return sum(known) if known else None
