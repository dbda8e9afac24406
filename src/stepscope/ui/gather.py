"""Copy the parts of one job from where they are into one run folder.

A file is copied under a temporary name and then renamed, so whatever ends the copying leaves whole
files only. A second call copies what is missing or has changed: gathered.json says what came from
where, and a copy keeps the time of its original.
"""

from __future__ import annotations

import contextlib
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import StepscopeError, UsageError
from stepscope.measure import folder as layout
from stepscope.records.host_names import HOSTS
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.one_job import check_one_job
from stepscope.trace.rank_facts import folder_rank, read_facts
from stepscope.trace.regular_files import MissingFileError, read_whole
from stepscope.ui.gather_copy import AT_ONCE, Copier, GatherRecord
from stepscope.ui.gather_join import host_file, join_run_files, refuse_other_hosts
from stepscope.ui.gather_plan import (
    GATHERED,
    RunSource,
    contested_ranks,
    list_copies,
    list_staged,
    name_ranks,
)
from stepscope.ui.gather_sources import open_sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.ui.gather_copy import Progress
    from stepscope.ui.gather_sources import Source, SourceFile

_MOST_BYTES = 256 << 20


class Amount(msgspec.Struct, frozen=True):
    files: int = 0
    size_bytes: int = 0

    @classmethod
    def of(cls, files: Iterable[SourceFile]) -> Amount:
        sizes = [file.size_bytes for file in files]
        return cls(len(sizes), sum(sizes))


class GatheredFrom(msgspec.Struct, frozen=True, kw_only=True):
    """One source, and which ranks it has."""

    source: str
    ranks: tuple[int, ...]
    copied: Amount


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """What a call did."""

    folder: str
    sources: tuple[GatheredFrom, ...]
    ranks: tuple[int, ...]
    world_size: int | None
    copied: Amount
    kept: Amount  # was there already
    left_out: Amount  # `explain` does not read it
    notes: tuple[str, ...] = ()


def gather(
    sources: Sequence[str],
    out: Path,
    *,
    everything: bool = False,
    progress: Progress | None = None,
) -> Gathered:
    """Raises UsageError for parts of different jobs, UnreadableInputError for a source that cannot
    be read. What was copied until then stays, and a second call goes on from there."""
    record = _open_target(out)
    opened = open_sources(sources)
    _refuse_target(opened, out)
    with tempfile.TemporaryDirectory(prefix="stepscope-gather-") as scratch:
        runs = _stage(opened, Path(scratch))
        _check_one_job(runs, out, record)
        targets, notes = name_ranks(runs)
        _refuse_other_ranks(runs, targets, out)
        copies, left_out = list_copies(runs, targets, everything=everything)
        out.mkdir(parents=True, exist_ok=True)
        copier = Copier(out, record, progress)
        names = [str(run.source) for run in runs]
        copier.save(names)  # from here on the folder is ours, even if we are ended
        try:
            copier.copy(copies, everything=everything)
            _write_joined(runs, targets, out)
        finally:
            copier.save(names)
    skipped = [copy.file for copy in copier.skipped]
    return Gathered(
        folder=str(out),
        sources=tuple(_describe(run, place, targets, copier) for place, run in enumerate(runs)),
        ranks=_ranks_in(out),
        world_size=_world_size(out),
        copied=Amount.of(copy.file for copy in copier.copied),
        kept=Amount.of(copy.file for copy in copier.kept),
        left_out=Amount.of([*left_out, *skipped]),
        notes=tuple(notes),
    )


def _open_target(out: Path) -> GatherRecord:
    """What an earlier call left. UsageError if the folder holds anything else."""
    try:
        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is a file: name a folder with -o")
        if not out.exists() or not any(out.iterdir()):
            return GatherRecord()
        record = decode(read_whole(out / GATHERED, _MOST_BYTES), GatherRecord)
    except MissingFileError:
        left = [path for path in out.rglob("*") if path.is_file() and path.suffix != ".tmp"]
        if not left:  # a call that was ended at once
            return GatherRecord()
        raise UsageError(
            f"{out} is not empty and was not gathered: name a new folder with -o"
        ) from None
    except NotJsonError as error:
        raise UsageError(f"{out / GATHERED} cannot be read ({error}): name a new folder") from None
    except OSError as error:
        raise UsageError(f"{out} cannot be used: {error.strerror}") from None
    for place in (out, out / HOSTS):
        layout.remove_leftovers(place)
    return record


def _refuse_target(sources: Sequence[Source], out: Path) -> None:
    for source in sources:
        if Path(source.name).resolve() == out.resolve():
            raise UsageError(f"{out} is one of the sources: name a new folder with -o")


def _stage(sources: Sequence[Source], scratch: Path) -> list[RunSource]:
    """Fetch the few small files that say what each source is."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        listings = list(pool.map(lambda source: source.files(), sources))
        contested = contested_ranks(listings)
        runs = [
            RunSource(source, files, scratch / str(place))
            for place, (source, files) in enumerate(zip(sources, listings, strict=True))
        ]
        list(pool.map(lambda run: _fetch_staged(run, contested), runs))
    return runs


def _fetch_staged(run: RunSource, contested: frozenset[str]) -> None:
    run.staged.mkdir()
    for file in list_staged(run.files, contested):
        target = run.staged / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        run.source.fetch(file.name, target)


def _check_one_job(runs: Sequence[RunSource], out: Path, record: GatherRecord) -> None:
    folders = [run.staged for run in runs]
    try:
        refuse_other_hosts({str(run.source): run.staged for run in runs})
        check_one_job([*([out] if record.files else []), *folders])
    except UsageError as error:
        message = str(error)
        for run in sorted(runs, key=lambda run: -len(str(run.staged))):
            message = message.replace(str(run.staged), str(run.source))
        raise UsageError(message) from None


def _refuse_other_ranks(
    runs: Sequence[RunSource], targets: dict[tuple[int, str], str], out: Path
) -> None:
    """A rank's folder that an earlier call made is never filled by another process."""
    for (place, name), target in targets.items():
        there = read_facts(out / target).get("process")
        if not there:
            continue
        staged = runs[place].staged / name / layout.RANK
        if not staged.exists() and any(
            file.name == f"{name}/{layout.RANK}" for file in runs[place].files
        ):
            staged.parent.mkdir(parents=True, exist_ok=True)
            runs[place].source.fetch(f"{name}/{layout.RANK}", staged)
        ours = read_facts(staged.parent).get("process")
        if ours is not None and ours != there:
            raise UsageError(
                f"{out / target} holds another process's part than {name} of "
                f"{runs[place].source}: gather all sources into a new folder"
            )


def _write_joined(
    runs: Sequence[RunSource], targets: dict[tuple[int, str], str], out: Path
) -> None:
    """run.json, and the times of hosts that closed a run of their own."""
    whole = join_run_files([run.staged for run in runs], targets)
    if whole is not None:
        _write(out / layout.RUN, _with_earlier(whole, out))
    if len(runs) < 2 and not (out / HOSTS).exists():
        return
    for run in runs:
        host = host_file(run.staged)
        if host is not None:
            (out / HOSTS).mkdir(exist_ok=True)
            _write(out / host[0], host[1])


def _with_earlier(whole: dict[str, Any], out: Path) -> dict[str, Any]:
    """Ranks and hosts that an earlier call gathered from other sources stay listed."""
    try:
        earlier = decode(read_whole(out / layout.RUN, _MOST_BYTES), dict[str, Any])
    except (StepscopeError, NotJsonError):
        return whole
    names = {rank.get("folder") for rank in whole.get("ranks") or ()}
    ranks = [rank for rank in earlier.get("ranks") or () if rank.get("folder") not in names]
    if ranks:
        whole = {**whole, "ranks": sorted([*whole["ranks"], *ranks], key=_folder)}
    return whole


def _folder(rank: dict[str, Any]) -> str:
    return str(rank.get("folder"))


def _write(path: Path, value: dict[str, Any]) -> None:
    with contextlib.suppress(StepscopeError, NotJsonError):
        if decode(read_whole(path, _MOST_BYTES), dict[str, Any]) == value:
            return
    try:
        layout.write_json(path, value)
    except OSError as error:
        raise UsageError(f"{path} could not be written: {layout.why_refused(error)}") from None


def _describe(
    run: RunSource, place: int, targets: dict[tuple[int, str], str], copier: Copier
) -> GatheredFrom:
    own = {folder_rank(Path(name)) or 0 for at, name in targets if at == place}
    copied = [copy.file for copy in copier.copied if copy.source is run.source]
    return GatheredFrom(source=str(run.source), ranks=tuple(sorted(own)), copied=Amount.of(copied))


def _ranks_in(out: Path) -> tuple[int, ...]:
    numbers = {folder_rank(folder) for folder in out.glob("rank-*")}
    return tuple(sorted(number for number in numbers if number is not None))


def _world_size(out: Path) -> int | None:
    for folder in sorted(out.glob("rank-*"))[:1]:
        world: int | None = read_facts(folder).get("world_size")
        return world
    return None
