"""Places in a training loop where the host waits for the device to read a value.

Found in the source alone: .item(), .cpu(), .tolist(), float(loss), print(loss), a loss in the test
of an `if`. What stands under an `if` with a remainder (every n-th step), in an inner loop or
in a function inside the loop is left out.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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
