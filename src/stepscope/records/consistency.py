"""Consistency of training through a parameter server: how far workers may run ahead of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ConsistencyName = Literal["strong", "bounded", "eventual", "weak"]
NAMES: tuple[ConsistencyName, ...] = get_args(ConsistencyName)
_TAKES_STEPS = ("bounded", "weak")
HOW = "give strong, bounded:STEPS, eventual or weak:STEPS, such as bounded:3"


class Consistency(msgspec.Struct, frozen=True, kw_only=True):
    """strong: all workers wait for each other at every step. bounded: a worker is at most `steps`
    steps ahead of the slowest. eventual: nobody waits. weak: nobody waits, and a worker goes on
    with the parameters it has until they are `steps` steps old."""

    name: ConsistencyName
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.steps}" if self.name in _TAKES_STEPS else self.name

    @classmethod
    def parse(cls, text: str) -> Consistency:
        """Raises ValueError with what to write instead."""
        word, colon, number = text.strip().partition(":")
        name = next((name for name in NAMES if name == word), None)
        if name is None or bool(colon) != (name in _TAKES_STEPS):
            raise ValueError(HOW)
        if not colon:
            return cls(name=name)
        least = 0 if name == "bounded" else 1
        if not number.isascii() or not number.isdigit() or int(number) < least:
            raise ValueError(HOW)
        return cls(name=name, steps=int(number))

    def needed_clocks(self, steps: int) -> NDArray[np.int64]:
        """For each of a worker's steps, what all workers must have finished before it starts."""
        clock = np.arange(steps + 1, dtype=np.int64)
        if self.name in ("eventual", "weak"):
            return np.zeros_like(clock)
        return np.maximum(clock - self.steps, 0)

    def pulled_clocks(self, steps: int) -> NDArray[np.bool_]:
        """For each of a worker's steps, whether it asks the servers for the parameters."""
        clock = np.arange(steps + 1, dtype=np.int64)
        return clock % (self.steps if self.name == "weak" else 1) == 0
