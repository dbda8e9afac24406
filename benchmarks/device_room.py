"""Share one GPU's memory between processes that each know what they need.

    room = Room(folder, device_bytes)
    with room.held(size):  # waits until so much is free
        ...

Whoever waits longest comes first, so that a large claim is not passed by many small ones for ever.
A claim ends with its process. To wait for more while holding some could last for ever: end one
claim before the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LOOK_S = 0.1
_USED = 0.95  # of the device's memory: the rest is for its driver
CONTEXT_BYTES = 800_000_000  # driver and libraries in each process (787 MB on an H200, torch 2.11)
SEGMENTS = 1.2  # what the allocator reserves, over what it has handed out at the peak


def needed(peaks: Sequence[int]) -> int:
    """Bytes of the device for processes with these peaks."""
    return round(sum(SEGMENTS * peak + CONTEXT_BYTES for peak in peaks))


class Room:
    """The claims of living processes, each in a file; None for a device without a limit."""

    def __init__(self, folder: Path, device_bytes: int | None) -> None:
        self._folder, self._limit = folder, device_bytes
        self.waited_s = 0.0
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        """A claim above all there is waits for all others to end."""
        if self._limit is None:
            yield
            return
        own, began = self._folder / str(os.getpid()), time.monotonic()
        with self._first_in_line():
            while (others := self._others()) and sum(others) + size > _USED * self._limit:
                time.sleep(_LOOK_S)
            new = own.with_suffix(".new")
            new.write_text(str(size))
            new.replace(own)
        self.waited_s += time.monotonic() - began
        try:
            yield
        finally:
            own.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _first_in_line(self) -> Iterator[None]:
        line = os.open(self._folder / "line", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(line, fcntl.LOCK_EX)
            yield
        finally:
            os.close(line)

    def _others(self) -> list[int]:
        claims = []
        for entry in self._folder.iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            if not Path("/proc", entry.name).exists():
                entry.unlink(missing_ok=True)
                continue
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                claims.append(int(entry.read_text()))
        return claims
