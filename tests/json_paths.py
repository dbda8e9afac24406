"""Every path that a verb's JSON can have, by the types of its records.

Records name types that only type checkers import, so names are looked up in the whole product:
a class name has one meaning there (test_house.py).
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import functools
import importlib
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

SOURCE = Path(__file__).parent.parent / "src"
NOT_PRINTED = {"series", "stacks"}  # every step and every stack stay in the run folder
_OPAQUE = {"Any", "NDArray", "np"}


def record_paths(name: str, prefix: str = "") -> Iterator[str]:
    """Yield the path of every value in a record that has other records in it."""
    yield from _paths(_Names({})[name], prefix, ())


def value_paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the path of every value in printed JSON."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from value_paths(inner, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from value_paths(inner, f"{prefix}[]")
    else:
        yield f"{prefix}[]" if isinstance(value, list) else prefix


def _paths(kind: Any, prefix: str, outer: tuple[Any, ...]) -> Iterator[str]:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for member in inner:
            if member is not type(None):
                yield from _paths(member, prefix, outer)
    elif origin in (tuple, list, set, frozenset, collections.abc.Sequence):
        yield from _paths(inner[0], f"{prefix}[]", outer)
    elif origin in (dict, collections.abc.Mapping):
        yield from _paths(inner[1], f"{prefix}.*", outer)
    elif hasattr(kind, "__struct_fields__") or hasattr(kind, "__dataclass_fields__"):
        if kind in outer:  # a part that has parts
            yield prefix
            return
        for name, annotation in _annotations(kind):
            yield from _paths(annotation, f"{prefix}.{name}" if prefix else name, (*outer, kind))
    else:
        yield prefix


def _annotations(record: type) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a record as JSON names them, with their types."""
    written = dict(
        zip(
            getattr(record, "__struct_fields__", ()),
            getattr(record, "__struct_encode_fields__", ()),
            strict=True,
        )
    )
    if issubclass(record, msgspec.Struct) and record.__struct_config__.tag:
        yield str(record.__struct_config__.tag_field), str
    for base in reversed(record.__mro__):
        names = _Names(vars(sys.modules[base.__module__]))
        for name, text in vars(base).get("__annotations__", {}).items():
            if name in NOT_PRINTED or name.startswith("_") or "ClassVar" in str(text):
                continue
            kind = eval(text, {"__builtins__": {}}, names) if isinstance(text, str) else text
            yield written.get(name, name), kind


class _Names(dict[str, Any]):
    """What a name in an annotation stands for: the module's own, or the product's."""

    def __init__(self, module: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module

    def __missing__(self, name: str) -> Any:
        if name in self.module:
            return self.module[name]
        if hasattr(builtins, name):
            return getattr(builtins, name)
        if name in _OPAQUE:
            return Any
        if name in ("Sequence", "Mapping", "Iterable"):
            return getattr(collections.abc, name)
        try:
            return getattr(importlib.import_module(_modules_by_name()[name]), name)
        except KeyError:
            return Any  # a column of numbers or the like


@functools.cache
def _modules_by_name() -> dict[str, str]:
    modules: dict[str, str] = {}
    for file in sorted((SOURCE / "stepscope").rglob("*.py")):
        module = ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                modules[node.name] = module
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                modules.setdefault(node.targets[0].id, module)
    return modules
