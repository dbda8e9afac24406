"""What we have changed in torch and in Python, so that it can be taken back in a living process.

A training command ends with its process. A notebook's kernel lives on: each captured cell would
leave another layer around torch's functions.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from stepscope.measure.never_raise import note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_undo: list[Callable[[], object]] = []


def replace(owner: Any, name: str, replacement: Any) -> None:
    """Set an attribute; detaching restores it if nobody else has replaced it since."""
    own = vars(owner)
    inherited, original = name not in own, own.get(name)
    setattr(owner, name, replacement)

    def restore() -> None:
        if vars(owner).get(name) is not replacement:
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    _undo.append(restore)


def when_detached(undo: Callable[[], object]) -> None:
    _undo.append(undo)


@contextlib.contextmanager
def detached_afterwards() -> Iterator[None]:
    """Take back, the latest first, what is attached inside."""
    kept = len(_undo)
    try:
        yield
    finally:
        while len(_undo) > kept:
            _restore(_undo.pop())


def _restore(undo: Callable[[], object]) -> None:
    try:
        undo()
    except Exception as error:
        note("detaching", error)
