"""Several run folders of one job, as hosts without a shared disk leave them: each part counts once.

A rank's folder is known by its process. Copies of the same folder are one part. Other processes of
the same rank are attempts, in the order in which they began.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from stepscope.errors import StepscopeError
from stepscope.records.quality import Note
from stepscope.records.words import counted
from stepscope.trace.decode import Oddities
from stepscope.trace.one_job import check_one_job
from stepscope.trace.rank_facts import RANK, decode_facts, folder_rank
from stepscope.trace.regular_files import is_folder
from stepscope.trace.remote import is_url, local_path
from stepscope.trace.run_state import is_run_folder
from stepscope.trace.run_times import began_unix_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_NAMED = 4


class JobFolders(msgspec.Struct, frozen=True, kw_only=True):
    """The run folders of one job."""

    runs: tuple[Path, ...] = ()
    ranks: tuple[Path, ...] = ()  # folders of ranks, sorted by name; no part twice
    same_rank: dict[str, tuple[Path, ...]] = {}  # by folder, if its rank has others elsewhere
    notes: tuple[Note, ...] = ()


def join_folders(paths: Iterable[str | Path]) -> JobFolders:
    """The run folders among the paths. UsageError if they belong to different jobs."""
    runs, repeated = _distinct_runs(paths)
    again = _about_copies([(path, path) for path in repeated])
    if len(runs) < 2:  # its ranks are found where they are needed
        return JobFolders(runs=tuple(runs), notes=tuple(again))
    by_rank: dict[int | str, list[Path]] = {}
    for folder in (rank for run in runs for rank in sorted(run.glob("rank-*")) if is_folder(rank)):
        number = folder_rank(folder)
        by_rank.setdefault(folder.name if number is None else number, []).append(folder)
    ranks: list[Path] = []
    same_rank: dict[str, tuple[Path, ...]] = {}
    copies: list[tuple[Path, Path]] = []
    for folders in by_rank.values():
        if len({folder.parent for folder in folders}) > 1:
            folders, dropped = drop_copies(folders)
            copies += dropped
            folders = order_by_start(folders)
        ranks += folders
        same_rank |= {str(folder): tuple(folders) for folder in folders if len(folders) > 1}
    return JobFolders(
        runs=tuple(runs),
        ranks=tuple(sorted(ranks, key=lambda folder: (folder.name, runs.index(folder.parent)))),
        same_rank=same_rank,
        notes=(*(_about_copies(copies) or again), *check_one_job(runs)),
    )


def _distinct_runs(paths: Iterable[str | Path]) -> tuple[list[Path], list[Path]]:
    """A folder that is given twice, under whatever name, is one. Then those that were repeated."""
    runs: dict[Path, Path] = {}
    repeated = []
    for path in paths:
        here = local_path(path) if isinstance(path, str) and is_url(path) else Path(path)
        try:
            if here is None or not is_folder(here) or not is_run_folder(here):
                continue
            real = here.resolve()
        except (StepscopeError, OSError):
            continue  # whoever reads it says why it cannot be read
        if real in runs:
            repeated.append(here)
        runs.setdefault(real, here)
    return list(runs.values()), repeated


def drop_copies(
    folders: Sequence[Path], size_of: Callable[[Path], int] | None = None
) -> tuple[list[Path], list[tuple[Path, Path]]]:
    """One folder of each process: the fullest. Then (copy, kept) for those that are left out."""
    by_process: dict[object, list[Path]] = {}
    for folder in folders:
        by_process.setdefault(_process_of(folder), []).append(folder)
    kept, dropped = [], []
    for copies in by_process.values():
        fullest = max(copies, key=size_of or _size_bytes)  # the first of equals
        kept.append(fullest)
        dropped += [(copy, fullest) for copy in copies if copy is not fullest]
    return kept, dropped


def order_by_start(folders: Sequence[Path]) -> list[Path]:
    """Those that do not say when they began come first, by name."""
    return sorted(folders, key=lambda folder: (began_unix_ns(folder) or 0, folder.name))


def _process_of(folder: Path) -> object:
    """What distinguishes the process that wrote a rank's folder."""
    facts = decode_facts(folder, Oddities(RANK))
    if facts.process not in (UNSET, None):
        return facts.process
    host = facts.host if isinstance(facts.host, str) else None
    pid = facts.pid if isinstance(facts.pid, int) else None
    return (host, pid) if pid is not None else folder.resolve()


def _size_bytes(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.iterdir())
    except OSError:
        return 0


def _about_copies(copies: Sequence[tuple[Path, Path]]) -> list[Note]:
    if not copies:
        return []
    named = [
        str(copy) if copy == kept else f"{copy} is a copy of {kept}"
        for copy, kept in copies[:_NAMED]
    ]
    more = f"; and {len(copies) - _NAMED} more" if len(copies) > _NAMED else ""
    parts = counted(len(copies), "part was", "parts were")
    detail = f"{parts} given twice; each counts once: {'; '.join(named)}{more}"
    return [Note(id="same-part-twice", detail=detail, count=len(copies))]
