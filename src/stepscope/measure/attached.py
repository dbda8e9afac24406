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

    Undo = Callable[[], object]

_layer: list[Undo] = []  # of the capture that attaches now


def replace(owner: Any, name: str, replacement: Any) -> None:
    """Set an attribute; detaching restores it unless somebody else has replaced it since."""
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

    when_detached(restore)


def when_detached(undo: Undo) -> None:
    _layer.append(undo)


@contextlib.contextmanager
def attaching() -> Iterator[list[Undo]]:
    """Collect what is attached inside, for `detach`."""
    layer: list[Undo] = []
    with _attaching_to(layer):
        yield layer


def detach(layer: list[Undo]) -> None:
    """Take everything back, the latest first."""
    while layer:
        _restore(layer.pop())


def attaching_later(action: Callable[[Any], None]) -> Callable[[Any], None]:
    """What the action attaches, whenever it runs, belongs to the capture that attaches now."""
    layer = _layer

    def act(argument: Any) -> None:
        with _attaching_to(layer):
            action(argument)

    return act


@contextlib.contextmanager
def _attaching_to(layer: list[Undo]) -> Iterator[None]:
    global _layer
    before, _layer = _layer, layer
    try:
        yield
    finally:
        _layer = before


def _restore(undo: Undo) -> None:
    try:
        undo()
    except Exception as error:
        note("detaching", error)
