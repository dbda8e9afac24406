"""Keep values on the device in steps that do not need them: a proposal, never injected."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from stepscope.fix.declaration import Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.python_source import Edit, PythonSource
from stepscope.records.script_facts import ScriptFacts

# Places in a training loop where the host waits for the device to read a value.
#
# Found in the source alone: .item(), .cpu(), .tolist(), float(loss), print(loss), a loss in the
# test of an `if`. What stands under an `if` with a remainder (every n-th step), in an inner loop or
# in a function inside the loop is left out.

_READS = ("item", "tolist", "cpu")
_CONVERSIONS = ("float", "int", "bool", "print")
_ELSEWHERE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.For, ast.While)


@dataclass(frozen=True, slots=True)
class BlockingRead:
    """An expression that waits, and the statement it stands in."""

    node: ast.expr
    statement: ast.stmt


def blocking_reads(loop: ast.For | ast.While) -> list[BlockingRead]:
    """In the order of the source."""
    losses = set(_losses(loop))
    reads = [
        BlockingRead(node, statement)
        for statement in _statements(loop.body)
        for node in _expressions(statement)
        if _reads(node, losses) or _is_test_of_loss(statement, node, losses)
    ]
    outermost = [
        read
        for read in reads
        if not any(
            read.node is not other.node and read.node in ast.walk(other.node) for other in reads
        )
    ]
    return sorted(outermost, key=lambda read: (read.node.lineno, read.node.col_offset))


def _losses(loop: ast.For | ast.While) -> Iterator[str]:
    """Names that backward is called on: loss.backward(), scaler.scale(loss).backward(),
    accelerator.backward(loss)."""
    for node in ast.walk(loop):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr == "backward":
            for value in (node.func.value, *node.args):
                yield from _own_names(value)


def _own_names(value: ast.expr) -> Iterator[str]:
    """Names in an expression, without those whose methods are called."""
    owners = {id(n.value) for n in ast.walk(value) if isinstance(n, ast.Attribute)}
    for node in ast.walk(value):
        if isinstance(node, ast.Name) and id(node) not in owners:
            yield node.id


def _statements(block: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run in every turn of the loop."""
    for statement in block:
        if isinstance(statement, _ELSEWHERE):
            continue
        yield statement
        if isinstance(statement, ast.If):
            if not _is_every_nth(statement.test):
                yield from _statements([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.With | ast.AsyncWith | ast.Try):
            yield from _statements(statement.body)


def _is_every_nth(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Mod) for node in ast.walk(test))


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Of the statement itself, not of the statements inside it."""
    waiting = [
        child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)
    ]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.expr):
            yield node
        waiting += ast.iter_child_nodes(node)


def _reads(node: ast.expr, losses: set[str]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        to_host = node.func.attr == "to" and any(
            isinstance(argument, ast.Constant) and argument.value == "cpu" for argument in node.args
        )
        return to_host or (node.func.attr in _READS and not node.args)
    named = isinstance(node.func, ast.Name) and node.func.id in _CONVERSIONS
    return named and any(_shows(argument, losses) for argument in node.args)


def _shows(argument: ast.expr, losses: set[str]) -> bool:
    """The loss itself, alone or in an f-string."""
    if isinstance(argument, ast.JoinedStr):
        return any(
            isinstance(part, ast.FormattedValue) and _shows(part.value, losses)
            for part in argument.values
        )
    return isinstance(argument, ast.Name) and argument.id in losses


def _is_test_of_loss(statement: ast.stmt, node: ast.expr, losses: set[str]) -> bool:
    """`if loss > limit`, `if torch.isnan(loss)`: the test needs the value."""
    if not isinstance(statement, ast.If) or node is not statement.test:
        return False
    if any(isinstance(part, ast.Is | ast.IsNot) for part in ast.walk(node)):
        return False
    return any(isinstance(part, ast.Name) and part.id in losses for part in ast.walk(node))


# Values stay on the device in steps that do not need them: a proposal, never injected.
#
# A running sum or list keeps tensors (.detach()) instead of numbers; a line that prints or logs
# runs every 50th step. Everything else is named with its file and line.

_EVERY = 50


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.device == "cpu":
        return "on a CPU no read waits for a device"
    return None


def patch(script: Script, value: str) -> Proposal:
    """In the innermost loop around the optimizer's step."""
    for _, source, statement in script.statements(script.facts.step or script.facts.backward):
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


NO_SYNC = Fix(fits=fits, patch=patch)
