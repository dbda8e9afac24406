"""Read what ranks and hosts recorded while no step ended: hang.json, hosts/*.hang.json."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from stepscope.errors import NotCapturedError
from stepscope.records.folders import (
    HANG,
    STEPS_FILE,
    ProcessIdentity,
    host_hang_files,
    process_state,
)
from stepscope.records.hang import (
    HangEvidence,
    HangProcess,
    HangRank,
    HangRecord,
    HostHang,
    LastWords,
    Seconds,
)
from stepscope.records.quality import Count, Note, Ranks
from stepscope.records.source_lines import Place
from stepscope.trace.decode import Oddities, read_record
from stepscope.trace.files import list_folder
from stepscope.trace.run_folder.rank_facts import RANK, folder_rank
from stepscope.trace.run_folder.run_state import MAX_RUN_BYTES, RUN, last_words
from stepscope.trace.run_folder.run_times import stamp_of

_T = TypeVar("_T")
_MOST_HOSTS = 20_000
_MOST_NOTES = 20


class _RankEnd(msgspec.Struct, frozen=True):
    """The part of rank.json that says whether the rank lives."""

    world_size: Ranks | None = None
    status: str = ""
    steps: Count | None = None
    process: ProcessIdentity | None = None


class _Run(msgspec.Struct, frozen=True):
    status: str = ""
    hang_after: Seconds | None = None


def read_hang(folder: Path) -> HangEvidence:
    """Raises NotCapturedError for a folder without any rank."""
    notes: list[Note] = []
    run = read_record(folder / RUN, _Run, max_bytes=MAX_RUN_BYTES) or _Run()
    ranks = [_read_rank(path, notes) for path in _last_attempts(list_folder(folder))]
    early, outside = _read_hosts(folder, notes)
    ranks += _early_ranks(early, {rank.rank for rank in ranks})
    if not ranks:
        raise NotCapturedError(
            f"{folder} holds no rank: no process has ended a step there or recorded a hang"
        )
    words = last_words(folder)
    seen = {process.folder or process.pid: process for process in outside}
    complete = [
        replace(
            rank,
            outside=seen.get(rank.folder or rank.pid or 0),
            last_words=_words(words, rank.rank),
        )
        for rank in ranks
    ]
    sizes = [rank.world_size for rank in complete if rank.world_size]
    return HangEvidence(
        folder=str(folder),
        ranks=tuple(sorted(complete, key=lambda rank: rank.rank)),
        world_size=max(sizes, default=None),
        hang_after_s=run.hang_after,
        has_ended=run.status == "finished",
        quiet_s=_quiet_s([folder / rank.folder for rank in complete if rank.folder]),
        notes=tuple(notes[:_MOST_NOTES]),
    )


def _last_attempts(folders: Iterable[Path]) -> list[Path]:
    """Of several processes of a rank the last one counts."""
    last: dict[int, tuple[int, Path]] = {}
    for path in folders:
        rank = folder_rank(path)
        if rank is not None:
            number = path.name.partition(".")[2]
            attempt = int(number) if number.isdecimal() and len(number) < 8 else 1
            last[rank] = max(last.get(rank, (0, path)), (attempt, path))
    return [path for _, path in last.values()]


def _read_rank(folder: Path, notes: list[Note]) -> HangRank:
    facts = read_record(folder / RANK, _RankEnd) or _RankEnd()
    record = _read(folder / HANG, f"{folder.name}/{HANG}", HangRecord, notes)
    return HangRank(
        rank=folder_rank(folder) or 0,
        folder=folder.name,
        world_size=facts.world_size or (record.world_size if record else None),
        status=facts.status,
        steps=facts.steps,
        pid=facts.process.pid if facts.process and facts.process.pid >= 0 else None,
        state=process_state(facts.process) if facts.process else "unknown",
        record=record,
        is_damaged=record is None and stamp_of(folder / HANG) is not None,
    )


# Children that train nothing, though they have loaded torch.
_HELPERS = ("/torch/utils/data/_utils/", "/multiprocessing/pool.py", "/concurrent/futures/")


def _early_ranks(records: Sequence[HangRecord], known: set[int]) -> list[HangRank]:
    """Processes that hang before their first step have no folder of their own.

    Those that were spawned and have joined no group get the numbers that are left, in the order of
    their start; none if there are more of them.
    """
    ranks = {record.rank: record for record in records if record.rank is not None}
    nameless = [record for record in records if record.rank is None and not _is_helper(record)]
    nameless.sort(key=lambda record: record.identity.pid if record.identity else 0)
    size = max((record.world_size or 1 for record in records), default=1)
    free = [n for n in range(size if ranks else len(nameless)) if n not in {*ranks, *known}]
    if len(nameless) <= len(free):
        ranks |= dict(zip(free, nameless, strict=False))
    return [_early_rank(rank, record) for rank, record in ranks.items() if rank not in known]


def _is_helper(record: HangRecord) -> bool:
    files = (frame.file for thread in record.threads[:1] for frame in thread.frames)
    return any(part in file for file in files for part in _HELPERS)


def _early_rank(rank: int, record: HangRecord) -> HangRank:
    identity = record.identity
    return HangRank(
        rank=rank,
        world_size=record.world_size,
        pid=identity.pid if identity and identity.pid >= 0 else None,
        state=process_state(identity) if identity else "unknown",
        record=record,
    )


class _HostFile(HostHang, frozen=True, kw_only=True):
    """Either what `run` saw, or the record of a process that has no folder yet."""

    identity: ProcessIdentity | None = None


def _read_hosts(folder: Path, notes: list[Note]) -> tuple[list[HangRecord], list[HangProcess]]:
    early, outside = [], []
    for file in host_hang_files(folder, _MOST_HOSTS):
        words = f"{file.parent.name}/{file.name}"
        content = _read(file, words, _HostFile, notes)
        if content is None:
            continue
        seen_ns = 1e9 * (content.noticed_unix or 0.0)
        for process in content.ranks:
            name = Path(process.folder).name
            steps = stamp_of(folder / name / STEPS_FILE) if name else None
            if steps is None or steps[0] <= seen_ns:  # it has not gone on since
                outside.append(process)
        if content.identity is not None:
            record = _read(file, words, HangRecord, notes)
            early += [record] if record is not None else []
    return early, outside


def _read(file: Path, name: str, kind: type[_T], notes: list[Note]) -> _T | None:
    oddities = Oddities(name)
    record = read_record(file, kind, oddities)
    notes += oddities.notes
    return record


def _words(words: dict[int, tuple[str, Place | None]], rank: int) -> LastWords | None:
    exception, place = words.get(rank, ("", None))
    return LastWords(exception=exception, place=place) if exception else None


def _quiet_s(folders: Sequence[Path]) -> float | None:
    """Since the last step was written; None where no clock says so."""
    stamps = [stamp for path in folders if (stamp := stamp_of(path / STEPS_FILE))]
    return max(0.0, time.time() - max(stamps)[0] / 1e9) if stamps else None
