"""Whether two texts are the same program: comments, blank lines and layout do not count."""

from __future__ import annotations

import ast
import hashlib
import warnings
from functools import lru_cache


@lru_cache(maxsize=256)
def program_key(text: str) -> str | None:
    """Equal for texts that run alike; None for a text that is not Python, as while it is typed."""
    tree = syntax_tree(text)
    return None if tree is None else hashlib.sha256(ast.dump(tree).encode()).hexdigest()


@lru_cache(maxsize=64)
def syntax_tree(text: str) -> ast.Module | None:
    """Not to be changed: it is shared."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about the user's own source
            return ast.parse(text.removeprefix("\ufeff"))  # a byte order mark
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def qualified_name(text: str, line: int) -> str:
    """The function around a line (from 1), with the classes and functions around it: Net.forward;
    empty at the top level, and for a text that is not Python."""
    around = [scope for scope in _scopes(text) if scope[0] <= line <= scope[1]]
    if not any(scope[3] for scope in around):
        return ""
    return ".".join(name for _, _, name, _ in around)


@lru_cache(maxsize=64)
def _scopes(text: str) -> tuple[tuple[int, int, str, bool], ...]:
    """First and last line, name, and whether it is a function; outer ones first."""
    tree = syntax_tree(text)
    if tree is None:
        return ()
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    scopes = [
        (node.lineno, node.end_lineno or node.lineno, node.name, isinstance(node, functions))
        for node in ast.walk(tree)
        if isinstance(node, functions | ast.ClassDef)
    ]
    return tuple(sorted(scopes, key=lambda scope: (scope[0], -scope[1])))
