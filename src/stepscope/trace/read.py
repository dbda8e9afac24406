"""read_trace: recognise the format, use the cache, read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.trace.files import SQLITE, has_holes
from stepscope.trace.regular_files import read_head
from stepscope.trace.remote import RemoteTrace, fetch, is_url, local_path
from stepscope.trace.snapshot_pickle import is_pickle

if TYPE_CHECKING:
    from stepscope.records.trace import Trace
    from stepscope.trace.files import Progress

# Smaller files are read faster than their digest and cache file are handled.
_CACHE_FROM_BYTES = 64 << 10
# A digest of larger files takes long enough to look first whether they begin as a trace does.
_LOOK_FROM_BYTES = 64 << 20
_NSYS_REPORT = b"NVIDIA Tegra Pro"  # the head of a .nsys-rep or .qdrep file


def read_trace(path: str | Path, *, cache: bool = True, progress: Progress | None = None) -> Trace:
    """Read one rank's trace from a Kineto JSON file (plain, gzip, zstd) or an Nsight SQLite export.

    `path` may be a URL. `progress(bytes_read, bytes_in_all)` is called now and then. Raises
    UnreadableInputError.
    """
    if isinstance(path, str) and is_url(path):
        return _read_url(path, cache, progress)
    path = Path(path)
    head = read_head(path)
    version = _version(path)
    if not cache or version is None or not _worth_a_digest(path, head, version[0]):
        return _read(path, head, progress)
    from stepscope.trace.cache import Cache

    store = Cache.default()
    key = store.key(path)
    trace = store.load(key, path)
    if trace is None:
        trace = _read(path, head, progress)
        if _version(path) == version:  # else somebody is still writing: the key is of other bytes
            store.save(key, trace)
    return trace


def _read_url(url: str, cache: bool, progress: Progress | None) -> Trace:
    local = local_path(url)
    if local:
        return read_trace(local, cache=cache, progress=progress)
    with fetch(RemoteTrace(url=url)) as path:
        return replace(read_trace(path, cache=cache, progress=progress), path=url)


def _worth_a_digest(path: Path, head: bytes, size_bytes: int) -> bool:
    """Whether reading all of it for its cache key is quicker than reading it as a trace.

    Raises UnreadableInputError where a large file is no trace.
    """
    if size_bytes < _CACHE_FROM_BYTES:
        return False
    if size_bytes < _LOOK_FROM_BYTES or head.startswith(SQLITE):
        return True
    from stepscope.trace.kineto import check_start

    check_start(path)
    return not has_holes(path)


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None  # gone: whoever opens it says so
    return info.st_size, info.st_mtime_ns, info.st_ino


def _read(path: Path, head: bytes, progress: Progress | None) -> Trace:
    if head.startswith(SQLITE):
        from stepscope.trace.nsys import read_nsys

        return read_nsys(path, progress)
    if head.startswith(_NSYS_REPORT) or path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        raise UnreadableInputError(
            f"{path} is an Nsight Systems report: export it first with "
            f"`nsys export --type sqlite {path}`"
        )
    if is_pickle(head):
        raise UnreadableInputError(
            f"{path} is a pickle, not a trace; a CUDA memory snapshot is read by `stepscope "
            "explain`"
        )
    from stepscope.trace.kineto import read_kineto

    return read_kineto(path, progress)
