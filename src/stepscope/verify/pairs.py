"""Alternating runs: which run of A is paired with which run of B, as `ab` records it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.files import read_whole

AB = "ab.json"


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two run folders inside the folder of an `ab`."""

    a: str
    b: str
    first: str  # "a" or "b"
    done: bool = False


class PairedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ab.json."""

    command_a: tuple[str, ...]
    command_b: tuple[str, ...]
    pairs: tuple[Pair, ...]
    seed: int = 0
    schema: int = 1


def plan_pairs(pairs: int, seed: int = 0) -> tuple[Pair, ...]:
    """A and B, then B and A, so that a steady drift of the machine affects both alike.

    Chance decides which of the two comes first, anew for every two pairs.
    """
    draws = np.random.default_rng(seed).integers(0, 2, -(-pairs // 2)).tolist()
    digits = max(2, len(str(pairs)))
    return tuple(
        Pair(
            a=f"a-{number + 1:0{digits}d}",
            b=f"b-{number + 1:0{digits}d}",
            first="ab"[(number + draws[number // 2]) % 2],
        )
        for number in range(pairs)
    )


def read_pairs(folder: Path) -> tuple[list[str], list[str]]:
    """A's and B's run folders of the finished pairs, in the same order."""
    file = folder / AB
    try:
        plan = decode(read_whole(file), PairedRuns)
    except NotJsonError as error:
        raise UnreadableInputError(f"{file} was not written by stepscope ab: {error}") from None
    done = [pair for pair in plan.pairs if pair.done]
    if not done:
        raise NotCapturedError(f"{folder}: no pair of runs has finished")
    return [str(folder / pair.a) for pair in done], [str(folder / pair.b) for pair in done]
