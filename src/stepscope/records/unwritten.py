"""How a rank reports, among its problems, that a file of its folder could not be written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

TRACE = "trace.json.gz"
SAVING = "saving the trace"
_UNWRITTEN = re.compile(r"writing ([\w.]+): (.*)", re.DOTALL)


def writing(name: str) -> str:
    """What was tried; the reason follows it."""
    return SAVING if name == TRACE else f"writing {name}"


def unwritten_parts(problems: Iterable[object]) -> dict[str, str]:
    """File -> the reason why it could not be written."""
    reasons = {}
    for problem in problems:
        match = _UNWRITTEN.fullmatch(str(problem))
        if match:
            reasons[match[1]] = match[2]
        elif str(problem).startswith(f"{SAVING}: "):
            reasons[TRACE] = str(problem)[len(SAVING) + 2 :]
    return reasons
