"""Who meets when clocks are compared: every rank of a small job, one rank per host of a large one.

Ranks of one host share its clock. In a large job a rank stands for its host: local rank 0 where the
launcher numbers them, else the first of the host to sign up in the job's store. Those who do not
meet ask the store once at most. The ones who meet form a tree, so that nobody holds more than
`FAN_OUT` connections.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

ALL_MEET = 64  # ranks; in a larger job one rank per host meets
FAN_OUT = 64
MOST_HOSTS = FAN_OUT + FAN_OUT**2  # a tree of two levels
_POLL_S = (0.001, 0.05)  # from, to
_POLLS_PER_S = 20_000  # that the store may get from all ranks together


class Missed(Exception):  # noqa: N818 - an outcome, not an error
    """A rank did not come."""


class MeetingPlace(NamedTuple):
    """A rank's number among those who meet, and how many they are; 0 is rank 0."""

    number: int
    size: int

    @property
    def parent(self) -> int | None:
        return (self.number - 1) // FAN_OUT if self.number else None

    @property
    def children(self) -> range:
        first = self.number * FAN_OUT + 1
        return range(first, max(first, min(first + FAN_OUT, self.size)))


class Pause:
    """Growing sleeps: quick while the others are near, cheap for the store when they are not."""

    def __init__(self, deadline: float, ranks: int = 1) -> None:
        self._deadline = deadline
        self._next_s = _POLL_S[0]
        self._longest_s = max(_POLL_S[1], ranks / _POLLS_PER_S)

    def sleep(self) -> bool:
        """Sleep a little; False when the time is up."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._next_s, left))
        self._next_s = min(self._next_s * 1.5, self._longest_s)
        return True


def is_on_several_hosts() -> bool:
    """A launcher that does not say may have started ranks on several."""
    local, world = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return local != world or not local


def local_place(world: int, environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """This rank's number on its host, and how many ranks the host has; None if nobody says."""
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    try:
        rank, size, all_ranks = (int(environ[name]) for name in names)
    except (KeyError, ValueError):
        return None
    return (rank, size) if all_ranks == world and 0 <= rank < size <= world else None


def find_place(
    store: Any, prefix: str, rank: int, world: int, deadline: float
) -> MeetingPlace | None:
    """None for a rank whose host is represented by another one."""
    if world <= ALL_MEET:
        return MeetingPlace(rank, world)
    index = _sign_up(store, prefix, rank, local_place(world))
    if index is None:
        return None
    pause = Pause(deadline, world)
    if index == 0:
        while (signed := int(store.add(f"{prefix}/ranks", 0))) != world:
            if not pause.sleep():
                raise Missed(f"only {signed} of {world} ranks registered in time")
        count = 1 + int(store.add(f"{prefix}/hosts", 0))
        store.set(f"{prefix}/count", str(count))
        return MeetingPlace(0, count)
    while not store.check([f"{prefix}/count"]):
        if not pause.sleep():
            raise Missed("not all ranks of the job registered in time")
    return MeetingPlace(index, int(store.get(f"{prefix}/count")))


def _sign_up(store: Any, prefix: str, rank: int, local: tuple[int, int] | None) -> int | None:
    """Count the host before its ranks: once all ranks are counted, so are all hosts."""
    if local is not None and local[0] and rank:
        return None
    stands_for = 1 if local is None else 0 if local[0] else local[1]
    first = local is not None or int(store.add(f"{prefix}/on/{_this_host()}", 1)) == 1
    index = 0 if rank == 0 else int(store.add(f"{prefix}/hosts", 1)) if first else None
    store.add(f"{prefix}/ranks", stands_for)
    return index


def _this_host() -> str:
    """Hosts may share a name, and containers of one host have several."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename}/{boot}"
