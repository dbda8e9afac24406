"""How much memory a training can still get on a device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import UnreadableInputError
from stepscope.trace.regular_files import read_start

if TYPE_CHECKING:
    import torch

_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")
_MOST_BYTES = 1 << 20


def free_bytes(device: torch.device) -> int | None:
    """Of the GPU, or of this host and container; None where it cannot be known."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()  # our own reserve would not be there for the training
        return int(torch.cuda.mem_get_info(device)[0])
    known = [size for size in (_host_bytes(), _container_bytes()) if size is not None]
    return min(known, default=None)


def _host_bytes() -> int | None:
    try:
        return _fields(_MEMINFO, ":")["MemAvailable"] << 10
    except (UnreadableInputError, KeyError):
        return None


def _container_bytes(folder: Path = _CONTAINER) -> int | None:
    """Without the files that it has in memory, which make room when it is needed."""
    try:
        limit, used = (
            int(read_start(folder / f"memory.{name}", _MOST_BYTES)) for name in ("max", "current")
        )
        files = _fields(folder / "memory.stat", " ").get("inactive_file", 0)
    except (UnreadableInputError, ValueError):  # no limit
        return None
    return max(0, limit - used + files)


def _fields(path: Path, between: str) -> dict[str, int]:
    """`name<between>number` in each line; other lines are left out."""
    fields = {}
    for line in read_start(path, _MOST_BYTES).decode(errors="replace").splitlines():
        name, _, value = line.partition(between)
        number = value.split()[:1]
        if number and number[0].isdigit():
            fields[name] = int(number[0])
    return fields
