"""read_trace: recognise the format, use the cache, read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.trace.files import SQLITE, head_of

if TYPE_CHECKING:
    from stepscope.records.trace import Trace
    from stepscope.trace.files import Progress

# Smaller files are read faster than their digest and cache file are handled.
_CACHE_FROM_BYTES = 64 << 10


def read_trace(path: str | Path, *, cache: bool = True, progress: Progress | None = None) -> Trace:
    """One rank's trace from a Kineto JSON file (plain, gzip, zstd) or an Nsight SQLite export.

    `progress(bytes_read, bytes_in_all)` is called now and then. Raises UnreadableInputError.
    """
    path = Path(path)
    head = head_of(path)
    if not cache or path.stat().st_size < _CACHE_FROM_BYTES:
        return _read(path, head, progress)
    from stepscope.trace.cache import Cache

    store = Cache.default()
    key = store.key(path)
    trace = store.load(key, path)
    if trace is None:
        trace = _read(path, head, progress)
        store.save(key, trace)
    return trace


def _read(path: Path, head: bytes, progress: Progress | None) -> Trace:
    if head.startswith(SQLITE):
        from stepscope.trace.nsys import read_nsys

        return read_nsys(path, progress)
    from stepscope.trace.kineto import read_kineto

    return read_kineto(path, progress)
