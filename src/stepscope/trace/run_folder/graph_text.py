"""A compiled graph as torch prints it: operators with shapes, dtypes and lines of the source."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from stepscope.records.compiled import GraphOperator
from stepscope.records.dtypes import BY_GRAPH_NAME
from stepscope.records.source_lines import Place

_TENSOR = r'"(?P<dtype>\w+)\[(?P<dims>[^\]]*)\][^"]*"'
_PLACEHOLDER = re.compile(rf"(?P<node>\w+)\s*:\s*{_TENSOR}")
_NODE = re.compile(
    rf"^\s*(?P<node>\w+)(?:\s*:\s*(?:{_TENSOR}|\"[^\"]*\"))?\s*=\s*"
    r"torch\.ops\.(?P<space>\w+)\.(?P<op>\w+)(?:\.\w+)?\("
)
_ITEM = re.compile(rf"^\s*(?P<node>\w+)\s*:\s*{_TENSOR}\s*=\s*(?P<of>\w+)\[\d+\]")
_FILE = re.compile(r"^\s*# File: (?P<file>.+):(?P<line>\d+) in (?P<function>[^,]+)")
_NO_PLACE = "# No stacktrace found"
_RETURNED = re.compile(r"^\s*return\s+[(\[]?(?P<names>.*?)[)\]]?\s*$")
_HEADER_END = re.compile(r"\)\s*(?:->[^:]*)?:\s*$")
_KEYWORD = re.compile(r"^[A-Za-z_]\w*\s*=(?!=)")
_WORD = re.compile(r"[A-Za-z_]\w*$")
MOST_OPERATORS = 200_000


class _Value(NamedTuple):
    dims: list[int] | None  # None for symbolic sizes
    dtype: str
    size_bytes: int | None


def read_graph(text: str) -> tuple[GraphOperator, ...]:
    """All operators in the order of the graph; views too."""
    values: dict[str, _Value] = {}
    parts: dict[str, str] = {}  # one of several results -> the operator that made it
    operators = []
    place: Place | None = None
    in_header = False
    for line in text.splitlines():
        if in_header or line.lstrip().startswith("def forward("):
            for match in _PLACEHOLDER.finditer(line):
                values[match["node"]] = _value(match)
            in_header = _HEADER_END.search(line) is None
        elif file := _FILE.match(line):
            place = Place(file=file["file"], line=int(file["line"]), function=file["function"])
        elif line.lstrip().startswith(_NO_PLACE):
            place = None
        elif node := _NODE.match(line):
            operators.append(_operator(node, line, values, parts, place))
        elif item := _ITEM.match(line):
            values[item["node"]] = _value(item)
            parts[item["node"]] = parts.get(item["of"], item["of"])
        if len(operators) >= MOST_OPERATORS:
            break
    return tuple(operators)


def returned_nodes(text: str) -> tuple[str, ...]:
    """Operators and inputs that the graph returns, in order."""
    parts: dict[str, str] = {}
    names: tuple[str, ...] = ()
    for line in text.splitlines():
        if item := _ITEM.match(line):
            parts[item["node"]] = parts.get(item["of"], item["of"])
        elif returned := _RETURNED.match(line):
            names = tuple(split_arguments(returned["names"]))
    return tuple(parts.get(name, name) for name in names)


def placeholders(text: str) -> dict[str, int]:
    """Bytes of the graph's inputs, by name."""
    header = text.split("def forward(", 1)[-1].split("\n", 1)[0]
    values = {match["node"]: _value(match) for match in _PLACEHOLDER.finditer(header)}
    return {name: one.size_bytes for name, one in values.items() if one.size_bytes is not None}


def _operator(
    node: re.Match[str],
    line: str,
    values: dict[str, _Value],
    parts: dict[str, str],
    place: Place | None,
) -> GraphOperator:
    if node["dtype"] is not None:
        values[node["node"]] = _value(node)
    shapes: list[Any] = []
    dtypes, concrete, inputs = [], [], []
    for argument in split_arguments(_inside(line, node.end())):
        if keyword := _KEYWORD.match(argument):
            inputs += [name for name in _names(argument[keyword.end() :].strip()) if name in values]
            continue
        value = values.get(argument)
        names = [name for name in _names(argument) if name in values]
        inputs += names
        if value is not None:
            shapes.append(value.dims if value.dims is not None else ["?"])
            dtypes.append(value.dtype)
            concrete.append("")
        elif names:
            shapes.append([values[name].dims or [] for name in names])
            dtypes.append("TensorList")
            concrete.append("")
        else:
            shapes.append([])
            dtypes.append("Scalar" if argument != "None" else "")
            concrete.append(argument if argument != "None" else "")
    own = values.get(node["node"]) if node["dtype"] is not None else None
    return GraphOperator(
        node=node["node"],
        name=f"{node['space']}::{node['op']}",
        shapes=shapes,
        dtypes=dtypes,
        concrete=concrete,
        inputs=tuple(dict.fromkeys(parts.get(name, name) for name in inputs)),
        size_bytes=own.size_bytes if own else None,
        place=place,
    )


def _value(match: re.Match[str]) -> _Value:
    known = BY_GRAPH_NAME.get(match["dtype"])
    dtype = known.profiler[0] if known else ""
    words = [word.strip() for word in match["dims"].split(",") if word.strip()]
    dims = [int(word) for word in words if word.isdecimal() and len(word) < 19]
    if len(dims) != len(words):
        return _Value(None, dtype, None)
    return _Value(dims, dtype, math.prod(dims) * known.item_bytes if known else None)


def _inside(line: str, begin: int) -> str:
    """Return the text from an opening bracket to the one that closes it."""
    depth = 1
    for place in range(begin, len(line)):
        depth += (line[place] in "([{") - (line[place] in ")]}")
        if not depth:
            return line[begin:place]
    return line[begin:]


def split_arguments(arguments: str) -> Iterator[str]:
    """Split at commas that are inside no bracket."""
    depth = begin = 0
    for place, letter in enumerate(arguments):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            yield arguments[begin:place].strip()
            begin = place + 1
    if rest := arguments[begin:].strip():
        yield rest


def _names(argument: str) -> list[str]:
    """Nodes that an argument names: itself, or the elements of a list."""
    if not argument.startswith(("[", "(")):
        return [argument] if _WORD.match(argument) else []
    return [word for word in split_arguments(argument[1:-1]) if _WORD.match(word)]
