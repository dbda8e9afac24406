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
