"""Regular expressions that are compiled when they are first used.

A run uses half of the product's patterns; compiling the others takes longer than many a step of
an explanation.
"""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast

_METHODS = ("search", "match", "fullmatch", "finditer", "findall", "split", "sub", "pattern")


class _LazyPattern:
    def __init__(self, pattern: str | bytes, flags: int) -> None:
        self._pattern, self._flags = pattern, flags

    def __getattr__(self, name: str) -> Any:
        """Called once: then the compiled pattern's methods are this object's own."""
        compiled: re.Pattern[Any] = re.compile(self._pattern, self._flags)
        self.__dict__.update({method: getattr(compiled, method) for method in _METHODS})
        return getattr(compiled, name)


def lazy_pattern(pattern: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """As re.compile. An error in the pattern shows only when it is used."""
    return cast("re.Pattern[AnyStr]", _LazyPattern(pattern, flags))
