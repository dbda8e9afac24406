"""Run a cell's code in the notebook's namespace, as the cell alone would have run."""

from __future__ import annotations

import ast
from typing import Any


def run_cell(shell: Any, cell: str) -> Any:
    """Returns the value of a last expression, for IPython to show. Lines with % and ! work; await
    outside a function does not."""
    __tracebackhide__ = True  # IPython leaves this frame out: errors are the cell's own
    source = shell.transform_cell(cell)
    name = shell.compile.cache(source, raw_code=cell)  # tracebacks show the cell's lines
    tree = shell.transform_ast(shell.compile.ast_parse(source, filename=name))
    statements, value = tree.body, None
    if statements and isinstance(statements[-1], ast.Expr):
        *statements, value = statements
    _execute(shell, ast.Module(statements, tree.type_ignores), name, "exec")
    return _execute(shell, ast.Expression(value.value), name, "eval") if value else None


def _execute(shell: Any, tree: ast.AST, name: str, mode: str) -> Any:
    __tracebackhide__ = True
    return eval(shell.compile(tree, name, mode), shell.user_global_ns, shell.user_ns)
