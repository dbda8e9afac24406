"""Read a trace (read_trace: recognise the format, use the cache) and everything that is
known about its rank (read_rank_inputs). Readers of a format or a side file are loaded
only when one is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.records.folders import STEPS_FILE
from stepscope.records.quality import Note
from stepscope.records.rank import MemoryInputs, RankInputs, StepColumns
from stepscope.trace.files import (
    SIDE_FILES,
    SQLITE,
    Progress,
    has_holes,
    is_pickle,
    may_exist,
    read_head,
)
from stepscope.trace.remote import RemoteTrace, fetch, is_url, local_path

if TYPE_CHECKING:
    from stepscope.records.hardware import Profile
    from stepscope.records.job import RankFolder
    from stepscope.records.trace import Trace

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
    from stepscope.trace.formats.kineto import check_start

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
        from stepscope.trace.formats.nsys import read_nsys

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
    from stepscope.trace.formats.kineto import read_kineto

    return read_kineto(path, progress)


# Read everything that is known about one rank: its trace and the files that capture wrote.

_FIRST_ENDS, _LAST_ENDS = 10, 100  # see explain/memory/lifetimes.py


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of one job are read."""

    cache: bool = True
    memory_limit: int | None = None  # bytes that the training may use on each device
    same_rank: dict[str, tuple[Path, ...]] = {}  # see JobFolders


AS_USUAL = ReadOptions()


def read_rank_inputs(
    path: str | Path,
    options: ReadOptions = AS_USUAL,
    *,
    name: str | None = None,
    progress: Progress | None = None,
) -> RankInputs:
    """Read the trace at `path` and what lies next to it. Raises UnreadableInputError.

    `name` is what the user calls the file, when it was fetched from elsewhere.
    """
    path = Path(path)
    trace = read_trace(path, cache=options.cache, progress=progress)
    trace = replace(trace, path=name or str(path))
    if any(may_exist(path.parent / file) for file in SIDE_FILES):
        return _read_captured_files(path, trace, options)
    limit = MemoryInputs(limit_bytes=options.memory_limit)
    return RankInputs(trace=trace, memory=limit)


def _read_captured_files(path: Path, trace: Trace, options: ReadOptions) -> RankInputs:
    """The readers of these files are loaded here: most bare traces need none of them."""
    from stepscope.trace.decode import Oddities
    from stepscope.trace.run_folder.compiler_record import read_captures, read_compiler_record
    from stepscope.trace.run_folder.rank_facts import decode_facts
    from stepscope.trace.run_folder.rank_folder import read_rank_folder, read_stack_samples
    from stepscope.trace.run_folder.related_runs import find_similar_runs
    from stepscope.trace.run_folder.run_times import read_run_times
    from stepscope.trace.run_folder.step_files import read_step_columns

    folder = read_rank_folder(path)
    if folder is not None:
        folder = replace(folder, similar=find_similar_runs(path.parent))
    oddities = Oddities(STEPS_FILE)
    steps = read_step_columns(path.parent, oddities)
    samples, sample_notes = read_stack_samples(path.parent)
    compiler, compiler_notes = read_compiler_record(path.parent)
    captures, capture_notes = read_captures(path.parent)
    facts = decode_facts(path.parent)
    others = (*oddities.notes, *sample_notes, *compiler_notes, *capture_notes)
    return RankInputs(
        trace=trace,
        steps=steps,
        times=read_run_times(path.parent, steps, options.same_rank.get(str(path.parent), ())),
        folder=folder,
        host_steps=tuple(facts.host_steps or ()),
        optimizer_lines=tuple(facts.optimizer_lines or ()),
        memory=_read_memory(path.parent, steps, others, options.memory_limit),
        samples=samples,
        compiler=compiler,
        captures=captures,
        calibrations=_find_calibrations(trace, folder),
    )


def _read_memory(
    folder: Path, steps: StepColumns | None, others: tuple[Note, ...], limit_bytes: int | None
) -> MemoryInputs:
    from stepscope.trace.run_folder.rank_folder import read_captured, read_saving

    captured, notes = read_captured(folder)
    saving, about_saving = read_saving(folder)
    return MemoryInputs(
        captured=captured,
        saving=saving,
        step_bytes=_sizes_at_ends(steps),
        limit_bytes=limit_bytes,
        notes=(*notes, *about_saving, *others),
    )


def _sizes_at_ends(steps: StepColumns | None) -> tuple[tuple[int, int], ...]:
    """Return the sizes at the ends of the first and the last steps; a long run has millions in
    between."""
    if steps is None or steps.allocated_bytes is None:
        return ()
    places = np.flatnonzero(steps.allocated_bytes >= 0)
    if len(places) > _FIRST_ENDS + _LAST_ENDS:
        places = np.concatenate((places[:_FIRST_ENDS], places[-_LAST_ENDS:]))
    return tuple(
        zip(steps.number[places].tolist(), steps.allocated_bytes[places].tolist(), strict=True)
    )


def _find_calibrations(trace: Trace, folder: RankFolder | None) -> tuple[Profile, ...]:
    """A bare trace does not say which machine it was recorded on."""
    if folder is None or folder.host is None:
        return ()
    from stepscope.trace.machine_profiles import find_calibrations

    return find_calibrations(folder.host, trace.kind)
