"""Make the tables of docs/reference/python.md from signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import TYPE_CHECKING, Any

from page_text import code, table

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_SHOWN = 6  # parameters


def signatures(names: str) -> str:
    """Return a row per name: `stepscope.explain`, or `stepscope.explain=module:function`."""
    return table(
        ("name", "what it does"), (_row(*name.partition("=")[::2]) for name in names.split())
    )


def _row(name: str, source: str) -> tuple[str, str]:
    target = _load(source or ":".join(name.rsplit(".", 1)))
    return code(name + _parameters(target)), _summary(target)


def _load(source: str) -> Any:
    module, _, name = source.partition(":")
    return getattr(importlib.import_module(module), name)


def _parameters(target: Any) -> str:
    if isinstance(target, type) and issubclass(target, BaseException):
        return ""
    return f"({', '.join(_shown(inspect.signature(target).parameters.values()))})"


def _shown(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """Return what must be given and the first options; `...` stands for the others."""
    shown: list[str] = []
    for parameter in parameters:
        by_name = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if by_name and not any(name.startswith("*") for name in shown):
            shown.append("*")
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            shown.append(f"*{parameter.name}")
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            shown.append(f"**{parameter.name}")
        elif parameter.default is inspect.Parameter.empty:
            shown.append(parameter.name)
        else:
            known = not callable(parameter.default)
            shown.append(f"{parameter.name}={parameter.default!r}" if known else parameter.name)
    return shown if len(shown) <= _MOST_SHOWN else [*shown[:_MOST_SHOWN], "..."]


def _summary(target: Any) -> str:
    """Return the first paragraph of the docstring on one line."""
    paragraph = (inspect.getdoc(target) or "").split("\n\n")[0]
    line = " ".join(paragraph.split())
    line = re.sub(r"\{[^}]*\}|\w+\*\w+|\w*_\w*(?:\(\))?", lambda found: code(found[0]), line)
    line = re.sub(r"``?`(\w+)``?`", r"`\1`", line)
    return line if line.endswith(".") else f"{line}."
