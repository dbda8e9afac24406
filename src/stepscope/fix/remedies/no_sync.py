"""Values stay on the device in steps that do not need them: a proposal, never injected.

A running sum or list keeps tensors (.detach()) instead of numbers; a line that prints or logs runs
every 50th step. Everything else is named with its file and line.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from stepscope.fix.blocking_reads import blocking_reads
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal

if TYPE_CHECKING:
    from stepscope.fix.blocking_reads import BlockingRead
    from stepscope.fix.proposal import Script
    from stepscope.fix.python_source import Edit, PythonSource
    from stepscope.records.script_facts import ScriptFacts

_EVERY = 50


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.device == "cpu":
        return "on a CPU no read waits for a device"
    return None


def patch(script: Script, value: str) -> Proposal:
    """In the innermost loop around the optimizer's step."""
    for frame in script.facts.step or script.facts.backward:
        source = script.source(frame.file)
        statement = source.statement_at(frame.line, frame.ends) if source is not None else None
        if source is None or statement is None:
            continue
        loops = source.loops_around(statement)
        if loops:
            return _propose(source, loops[0])
    return Proposal()


def _propose(source: PythonSource, loop: ast.For | ast.While) -> Proposal:
    proposal = Proposal()
    counter = _counter(loop)
    wrapped: set[ast.stmt] = set()
    for read in blocking_reads(loop):
        if read.statement in wrapped:
            continue
        kept = _keep_on_device(source, read)
        if kept is not None:
            proposal += Proposal(edits=(kept,))
        elif counter is not None and _only_shows(read.statement):
            header = f"if {counter} % {_EVERY} == 0:"
            wrapped.add(read.statement)
            proposal += Proposal(edits=source.wrap(read.statement, read.statement, header))
        else:
            proposal += Proposal(by_hand=(_words(source, read),))
    return proposal


def _keep_on_device(source: PythonSource, read: BlockingRead) -> Edit | None:
    """`total += loss.item()` and `losses.append(loss.item())`: sums and lists hold tensors too."""
    node, statement = read.node, read.statement
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    if node.func.attr != "item":
        return None
    is_sum = isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add)
    is_appended = (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and source.called(statement.value) == "append"
        and statement.value.args == [node]
    )
    if not (is_sum or is_appended):
        return None
    return source.replace(node, f"{source.segment(node.func.value)}.detach()")


def _only_shows(statement: ast.stmt) -> bool:
    """A call for its effect alone, such as print or a logger's: not one that collects values."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
    return name in ("print", "info", "debug", "log", "add_scalar", "set_postfix", "write")


def _counter(loop: ast.For | ast.While) -> str | None:
    """The step's number, where the loop counts: with enumerate or range."""
    if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
        return None
    function = ast.unparse(loop.iter.func)
    if function == "range" and isinstance(loop.target, ast.Name):
        return loop.target.id
    if function == "enumerate" and isinstance(loop.target, ast.Tuple):
        first = loop.target.elts[0]
        return first.id if isinstance(first, ast.Name) else None
    return None


def _words(source: PythonSource, read: BlockingRead) -> str:
    text = " ".join(source.segment(read.node).split())
    return (
        f"{source.file}:{read.node.lineno}: `{text}` waits for the GPU in every step. Keep "
        f"the tensor (.detach()) and read it every {_EVERY} steps"
    )


FIX = Fix(id="no-sync", effect=Effect.BIT_IDENTICAL, fits=fits, patch=patch)
