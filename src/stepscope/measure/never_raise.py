"""Nothing of ours ever raises into the training; what went wrong is kept for run.json."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    P = ParamSpec("P")

R = TypeVar("R")
_KEEP = 50
_problems: list[str] = []
_seen: set[str] = set()
_lock = threading.Lock()


def note(where: str, problem: BaseException | str) -> None:
    """Remember a problem once."""
    text = problem if isinstance(problem, str) else f"{type(problem).__name__}: {problem}"
    line = f"{where}: {text}"
    with _lock:
        if line not in _seen and len(_problems) < _KEEP:
            _seen.add(line)
            _problems.append(line)


def problems() -> list[str]:
    with _lock:
        return list(_problems)


def forget_problems() -> None:
    """Before another capture in the same process."""
    with _lock:
        _problems.clear()
        _seen.clear()


def never_raise(function: Callable[P, R]) -> Callable[P, R | None]:
    """Swallow and note every Exception; KeyboardInterrupt and SystemExit pass."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> R | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            note(function.__qualname__, error)
            return None

    return wrapper
