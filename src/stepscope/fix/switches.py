"""Switches of torch that are set once, by a line at the top of the script."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from stepscope.fix.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stepscope.fix.proposal import Script
    from stepscope.fix.python_source import Edit, PythonSource


def set_switches(
    script: Script, switches: Mapping[str, str], *, others: Mapping[str, str] | None = None
) -> Proposal:
    """Set each (a function of one argument, or an attribute, of torch) to a value.

    Where the script sets it already, its value is replaced; for `others`, only there.
    """
    found = script.source_of(script.facts.forward[::-1])
    if found is None:
        lines = [_line(switch, value) for switch, value in switches.items()]
        return Proposal(by_hand=(f"before training: {'; '.join(lines)}",))
    source, _ = found
    edits: list[Edit] = []
    missing: list[str] = []
    for switch, value in switches.items():
        places = list(_values(source, switch))
        edits += [source.replace(place, value) for place in places]
        if not places:
            missing.append(_line(switch, value))
    for switch, value in (others or {}).items():
        edits += [source.replace(place, value) for place in _values(source, switch)]
    if missing:
        edits += [*source.ensure_import("torch"), source.insert_after_imports(*missing)]
    return Proposal(edits=tuple(edits))


def _line(switch: str, value: str) -> str:
    is_function = switch.endswith("()")
    return f"{switch[:-2]}({value})" if is_function else f"{switch} = {value}"


def _values(source: PythonSource, switch: str) -> Iterator[ast.expr]:
    """The values that the file sets it to."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and f"{ast.unparse(node.func)}()" == switch and node.args:
            yield node.args[0]
        if isinstance(node, ast.Assign) and switch in map(ast.unparse, node.targets):
            yield node.value
