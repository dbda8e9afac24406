"""stepscope gather: copy the parts of one job from several hosts into one run folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

import stepscope
from stepscope.errors import UnreadableInputError, UsageError
from stepscope.measure import folder as layout
from stepscope.records.folders import HOSTS
from stepscope.text.figures import size
from stepscope.text.words import counted
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.discover import check_one_job
from stepscope.trace.files import MissingFileError, read_whole
from stepscope.trace.run_folder.rank_facts import folder_rank, read_facts
from stepscope.trace.run_folder.windows import choose_window, window_number
from stepscope.ui.cli.options import complete_file, flag, json_option, out_option, verb
from stepscope.ui.jobs.gather_parts import (
    GATHERED,
    FileCopy,
    RunSource,
    Source,
    SourceFile,
    contested_ranks,
    host_file,
    join_run_files,
    list_copies,
    list_staged,
    name_ranks,
    open_sources,
    refuse_other_hosts,
)
from stepscope.ui.jobs.run_folder import read_record
from stepscope.ui.json_text import write_json

if TYPE_CHECKING:
    Progress = Callable[[int, int], None]

_NAMED = 8


@verb(
    "gather",
    examples=(
        (
            "stepscope gather ssh://node1/job/run ssh://node2/job/run -o run",
            "Copy the parts of two hosts, then explain the folder",
        ),
        ("stepscope gather s3://bucket/job -o run", "Copy a run from a bucket"),
    ),
)
@click.argument("sources", nargs=-1, required=True, shell_complete=complete_file)
@out_option(
    "The run folder to make or to complete.",
    required=True,
    type=click.Path(path_type=Path),
)
@flag(
    "--all",
    "Also copy what `explain` does not read: reports, other recordings, traces of stalls.",
    "everything",
)
@json_option
def command(sources: tuple[str, ...], out: Path, everything: bool, as_json: bool) -> None:
    """Copy the parts of one job from several hosts or buckets into one run folder.

    SOURCES are run folders, folders of run folders or globs. They may be here, at
    ssh://host/folder, at s3://bucket/folder, or at any URL that fsspec reads. A second call copies
    only what is missing or has changed.
    """
    import msgspec

    from stepscope.ui.progress import shown_progress

    with shown_progress(quiet=as_json, verb="copying") as progress:
        gathered = gather(sources, out, everything=everything, progress=progress)
    if as_json:
        write_json({"schema": 1, **msgspec.to_builtins(gathered)})
        return
    for line in _lines(gathered):
        click.echo(line)


def _lines(gathered: Gathered) -> list[str]:
    found, world = len(gathered.ranks), gathered.world_size
    of_all = f" of {world}" if world and world != found else ""
    sources = counted(len(gathered.sources), "source")
    left_out = f"; {_amount(gathered.left_out)} left out (--all)" if gathered.left_out.files else ""
    lines = [
        f"gathered  {counted(found, 'rank')}{of_all} from {sources} into {gathered.folder}",
        f"copied    {_amount(gathered.copied)}; {_amount(gathered.kept)} there already{left_out}",
        *(f"note      {note}" for note in gathered.notes[:_NAMED]),
    ]
    if world and world > found:
        missing = [rank for rank in range(world) if rank not in set(gathered.ranks)]
        named = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
        lines.append(f"missing   ranks {named}: gather their host's folder into {gathered.folder}")
    return [*lines, f"next      stepscope explain {gathered.folder}"]


def _amount(amount: Amount) -> str:
    return f"{counted(amount.files, 'file')} ({size(amount.size_bytes)})"


# A file is copied under a temporary name and then renamed, so whatever ends the copying leaves
# whole files only. A second call copies what is missing or has changed: gathered.json says what
# came from where, and a copy keeps the time of its original.

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
    """Return what an earlier call left. UsageError if the folder holds anything else."""
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
    earlier = read_record(out / layout.RUN) or {}
    names = {rank.get("folder") for rank in whole.get("ranks") or ()}
    ranks = [rank for rank in earlier.get("ranks") or () if rank.get("folder") not in names]
    if not ranks:
        return whole
    ranks = sorted([*whole["ranks"], *ranks], key=lambda rank: str(rank.get("folder")))
    return {**whole, "ranks": ranks}


def _write(path: Path, value: dict[str, Any]) -> None:
    if read_record(path) == value:
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


# Files copied into one folder, each whole or not at all; what is there already stays.

AT_ONCE = 8
_SAME_TIME_S = 1.0  # file systems keep times more or less finely


class CopiedFile(msgspec.Struct, frozen=True):
    """One file in gathered.json."""

    source: str
    size_bytes: int
    stamp: str


class GatherRecord(msgspec.Struct, frozen=True):
    """gathered.json."""

    schema: int = 1
    stepscope: str = ""
    sources: tuple[str, ...] = ()
    files: dict[str, CopiedFile] = {}
    updated_unix: float | None = None


class Copier:
    """Copies files into one folder, and knows which were there."""

    def __init__(self, out: Path, record: GatherRecord, progress: Progress | None) -> None:
        self._out, self._record, self._progress = out, record, progress
        self._files = dict(record.files)
        self._done_bytes = self._all_bytes = 0
        self.copied: list[FileCopy] = []
        self.kept: list[FileCopy] = []
        self.skipped: list[FileCopy] = []  # windows that do not stand for the run

    def copy(self, copies: Sequence[FileCopy], *, everything: bool) -> None:
        """Traces come last: which window of them is needed, the steps say."""
        traces = [copy for copy in copies if _window(copy) is not None]
        small = [copy for copy in copies if _window(copy) is None]
        self._all_bytes = sum(copy.file.size_bytes for copy in copies)
        self._copy_all(small)
        chosen = traces if everything else _chosen_windows(traces, self._out)
        self.skipped = [copy for copy in traces if copy not in chosen]
        self._all_bytes -= sum(copy.file.size_bytes for copy in self.skipped)
        self._copy_all(chosen)

    def _copy_all(self, copies: Sequence[FileCopy]) -> None:
        wanted = []
        for copy in copies:
            if self._is_there(copy):
                self.kept.append(copy)
                self._advance(copy)
            else:
                wanted.append(copy)
        for folder in {(self._out / copy.target).parent for copy in wanted}:
            folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            running = {pool.submit(self._copy, copy): copy for copy in wanted}
            try:
                for done in as_completed(running):
                    done.result()
                    copy = running[done]
                    self._remember(copy)
                    self.copied.append(copy)
                    self._advance(copy)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _copy(self, copy: FileCopy) -> None:
        target = self._out / copy.target
        file = copy.file
        try:
            with layout.replacing(target) as unfinished:
                copy.source.fetch(file.name, unfinished)
                size = unfinished.stat().st_size
                if size < file.size_bytes:
                    raise UnreadableInputError(
                        f"{copy.source}/{file.name}: only {size} of {file.size_bytes} bytes came: "
                        "gather again"
                    )
                if file.modified_unix is not None:
                    os.utime(unfinished, (file.modified_unix, file.modified_unix))
        except OSError as error:
            why = layout.why_refused(error)
            raise UsageError(f"{target} could not be written: {why}") from None

    def _is_there(self, copy: FileCopy) -> bool:
        """Return whether an earlier call copied this very file."""
        try:
            state = (self._out / copy.target).stat()
        except OSError:
            return False
        known = self._files.get(copy.target)
        listed = (copy.file.size_bytes, copy.file.stamp)
        if known is not None and (known.size_bytes, known.stamp) == listed and copy.file.stamp:
            return known.size_bytes <= state.st_size
        modified = copy.file.modified_unix
        if state.st_size != copy.file.size_bytes or modified is None:
            return False
        if abs(state.st_mtime - modified) > _SAME_TIME_S:
            return False
        self._remember(copy)
        return True

    def _remember(self, copy: FileCopy) -> None:
        self._files[copy.target] = CopiedFile(
            str(copy.source), copy.file.size_bytes, copy.file.stamp
        )

    def _advance(self, copy: FileCopy) -> None:
        self._done_bytes += copy.file.size_bytes
        if self._progress:
            self._progress(self._done_bytes, self._all_bytes)

    def save(self, sources: Sequence[str]) -> None:
        record = GatherRecord(
            stepscope=stepscope.__version__,
            sources=tuple(dict.fromkeys([*self._record.sources, *sources])),
            files=dict(sorted(self._files.items())),
            updated_unix=time.time(),
        )
        with contextlib.suppress(OSError):
            layout.write_json(self._out / GATHERED, msgspec.to_builtins(record))


def _window(copy: FileCopy) -> int | None:
    folder, _, name = copy.target.rpartition("/")
    return window_number(name) if folder_rank(Path(folder)) is not None else None


def _chosen_windows(traces: Sequence[FileCopy], out: Path) -> list[FileCopy]:
    """Choose the window that `explain` takes for the run, where there are several."""
    by_rank: dict[str, dict[int, FileCopy]] = {}
    for copy in sorted(traces, key=lambda copy: copy.target):
        number = _window(copy)
        if number is not None:
            by_rank.setdefault(copy.target.rpartition("/")[0], {}).setdefault(number, copy)
    if not by_rank:
        return []
    chosen = choose_window([set(windows) for windows in by_rank.values()], out / min(by_rank))
    return [windows.get(chosen) or windows[min(windows)] for windows in by_rank.values()]
