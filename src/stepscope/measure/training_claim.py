"""Which thread trains: the first one that asks."""

from __future__ import annotations

from threading import get_ident


class TrainingClaim:
    """Threads may ask at the same time. Taking it is one operation, which no other thread can come
    between, so only one of them becomes a rank."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def take(self) -> bool:
        """Whether this thread has it now."""
        return self._taken.setdefault("by", get_ident()) == get_ident()

    def release(self) -> None:
        """What was taken for training was none."""
        self._taken.clear()
