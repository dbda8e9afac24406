"""Where in the source a model is complete and training has not begun: the place for a statement
such as `model.compile()`."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from stepscope.fix.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepscope.fix.proposal import Script
    from stepscope.fix.python_source import Edit, PythonSource
    from stepscope.records.script_facts import Frame, RootCall

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class RootPlace:
    """A statement, and what the model is called there."""

    source: PythonSource
    name: str
    statement: ast.stmt
    is_after: bool  # the new lines follow the statement

    def insert(self, *lines: str) -> Edit:
        add = self.source.insert_after if self.is_after else self.source.insert_before
        return add(self.statement, *lines)


def add_before_training(
    script: Script, lines: Callable[[str, RootCall], tuple[str, ...]], *, only: str | None = None
) -> Proposal:
    """`lines(name, call)` are the statements for a model of this name; `only` names its type."""
    proposal = Proposal()
    for call in script.facts.root_calls:
        if only is not None and call.type != only:
            continue
        place = place_before_training(script, call)
        if place is None:
            proposal += Proposal(by_hand=(_by_hand(call, lines("model", call)),))
        else:
            proposal += Proposal(edits=(place.insert(*lines(place.name, call)),))
    return proposal


def import_where_edited(script: Script, proposal: Proposal, *modules: str) -> Proposal:
    """Also import these in the files that the proposal changes."""
    imports = [
        edit
        for file in dict.fromkeys(edit.file for edit in proposal.edits)
        for module in modules
        for source in [script.source(file)]
        if source is not None
        for edit in source.ensure_import(module)
    ]
    return Proposal(edits=tuple(imports)) + proposal


def submodule(name: str, path: str) -> str:
    """Source text of a module inside another."""
    if not path:
        return name
    is_attribute = all(part.isidentifier() for part in path.split("."))
    return f"{name}.{path}" if is_attribute else f'{name}.get_submodule("{path}")'


def _by_hand(call: RootCall, lines: tuple[str, ...]) -> str:
    where = f" ({call.type} is called at {call.frames[0].words})" if call.frames else ""
    return f"once, before training{where}: {'; '.join(line.strip() for line in lines)}"


def place_before_training(script: Script, call: RootCall) -> RootPlace | None:
    """Before the outermost loop that has the model, else after the statement that sets it."""
    repeated = False
    callers = (*call.frames[1:], None)
    for frame, name, caller in reversed(list(zip(call.frames, call.names, callers, strict=True))):
        source = script.source(frame.file)
        statement = source.statement_at(frame.line, frame.ends) if source is not None else None
        if source is None or statement is None:
            continue
        loops = list(_loops_around(source, statement))
        by_library = caller is not None and not _calls(script, caller, frame)
        if name and not repeated:
            having = _loops_with(name, loops)
            if having or not (loops or by_library):
                first = having[-1] if having else statement
                return RootPlace(source, name, first, False) if source.starts_line(first) else None
        if name:
            setting = _only_setting(source, statement, name)
            if setting is not None:
                return RootPlace(source, name, setting, True)
        repeated = repeated or bool(loops) or by_library
    return None


def _calls(script: Script, caller: Frame, called: Frame) -> bool:
    """Whether the statement of one frame calls the other's function itself. If not, a library does,
    such as a trainer its hooks: perhaps in every step."""
    source = script.source(caller.file)
    statement = source.statement_at(caller.line, caller.ends) if source is not None else None
    name = called.function.rpartition(".")[2]
    if source is None or statement is None or name.startswith("__"):
        return True
    calls = [source.called(node) for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return name in (*calls, "forward", "<lambda>", "<module>")


def _loops_around(source: PythonSource, statement: ast.stmt) -> Iterator[ast.stmt]:
    """Of the same function, innermost first."""
    if isinstance(statement, _LOOPS):
        yield statement
    for node in source.parents_of(statement):
        if isinstance(node, _SCOPES):
            return
        if isinstance(node, _LOOPS):
            yield node


def _loops_with(name: str, loops: list[ast.stmt]) -> list[ast.stmt]:
    """From the innermost outwards, as long as the name is set outside."""
    return list(takewhile(lambda loop: not _is_set_in(loop, name), loops))


def _is_set_in(node: ast.AST, name: str) -> bool:
    return any(_sets(part, name) for part in ast.walk(node))


def _sets(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Name | ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node) == name
    )


def _only_setting(source: PythonSource, statement: ast.stmt, name: str) -> ast.stmt | None:
    """`self.model = ...`, if it stands once in the class, outside loops."""
    if not name.startswith("self."):
        return None
    parents = source.parents_of(statement)
    owner = next((node for node in parents if isinstance(node, ast.ClassDef)), None)
    if owner is None:
        return None
    settings = [
        node
        for node in ast.walk(owner)
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_set_in(node, name)
    ]
    if len(settings) != 1 or list(_loops_around(source, settings[0])):
        return None
    return settings[0]
