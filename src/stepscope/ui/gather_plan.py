"""Which files of which sources make up one run folder, and under which names.

A rank's folder is known by its process. A second copy of it is left out. Other processes of the
same rank are attempts if they followed each other; otherwise the sources are refused.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import UsageError
from stepscope.measure.folder import RUN
from stepscope.records.host_names import HOSTS
from stepscope.records.packed_steps import TAIL
from stepscope.trace.job_folders import drop_copies, order_by_start
from stepscope.trace.layout import is_side_file
from stepscope.trace.nccl_log import is_log_name
from stepscope.trace.rank_facts import RANK, folder_rank
from stepscope.trace.run_times import began_unix_ns, last_end_unix_ns
from stepscope.trace.windows import window_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.ui.gather_sources import Source, SourceFile

GATHERED = "gathered.json"
_UNFINISHED = re.compile(r"\..*\.tmp")
_OWN = (RUN, GATHERED)


class RunSource(msgspec.Struct, frozen=True):
    """A source with the files that it lists; `staged` has its small files, to look at."""

    source: Source
    files: list[SourceFile]
    staged: Path

    def size_bytes(self, folder: str) -> int:
        return sum(file.size_bytes for file in self.files if file.name.startswith(f"{folder}/"))

    def ranks(self) -> list[str]:
        """Folders of ranks."""
        names = {file.name.partition("/")[0] for file in self.files if "/" in file.name}
        return sorted(name for name in names if folder_rank(Path(name)) is not None)


class FileCopy(msgspec.Struct, frozen=True, kw_only=True):
    """One file, from where and to which name in the run folder."""

    source: Source
    file: SourceFile
    target: str


def list_staged(files: Iterable[SourceFile], everyone: frozenset[str]) -> list[SourceFile]:
    """The small files that decide what belongs where: of ranks that other sources also have,
    their facts and steps; of every source, those of one rank."""
    files = list(files)
    first = next((file.name for file in files if file.name.endswith(f"/{RANK}")), "")
    wanted = []
    for file in files:
        folder, _, name = file.name.rpartition("/")
        about_run = file.name == RUN or (folder == HOSTS and name.endswith(".json"))
        number = folder_rank(Path(folder))
        contested = str(number) in everyone and (name in (RANK, TAIL) or is_part(name))
        if about_run or file.name == first or contested:
            wanted.append(file)
    return wanted


def is_part(name: str) -> bool:
    """A part of a long list of steps."""
    return name.startswith("steps-")


def contested_ranks(listings: Sequence[Sequence[SourceFile]]) -> frozenset[str]:
    """Numbers of ranks that several sources have."""
    seen: dict[str, int] = {}
    for files in listings:
        folders = {file.name.partition("/")[0] for file in files}
        numbers = {str(n) for name in folders if (n := folder_rank(Path(name))) is not None}
        for number in numbers:
            seen[number] = seen.get(number, 0) + 1
    return frozenset(number for number, count in seen.items() if count > 1)


def name_ranks(runs: Sequence[RunSource]) -> tuple[dict[tuple[int, str], str], list[str]]:
    """(place of the source, folder there) -> folder of the gathered run; then what to say."""
    by_rank: dict[int, list[tuple[int, str]]] = {}
    for place, run in enumerate(runs):
        for name in run.ranks():
            by_rank.setdefault(folder_rank(Path(name)) or 0, []).append((place, name))
    targets: dict[tuple[int, str], str] = {}
    notes: list[str] = []
    for number, parts in by_rank.items():
        if len({place for place, _ in parts}) == 1:
            targets |= {part: part[1] for part in parts}
            continue
        staged = {runs[place].staged / name: (place, name) for place, name in parts}
        sizes = {path: runs[part[0]].size_bytes(part[1]) for path, part in staged.items()}
        kept, copies = drop_copies(list(staged), sizes.__getitem__)
        kept = _in_order(kept, number, {path: runs[part[0]] for path, part in staged.items()})
        for attempt, path in enumerate(kept, 1):
            targets[staged[path]] = f"rank-{number:05d}" + (f".{attempt}" if attempt > 1 else "")
        notes += [
            f"rank {number} of {runs[staged[copy][0]].source} is the same as in "
            f"{runs[staged[other][0]].source}: copied once"
            for copy, other in copies
        ]
    return targets, notes


def _in_order(folders: Sequence[Path], number: int, whose: dict[Path, RunSource]) -> list[Path]:
    """Attempts, one after another. UsageError for processes that ran at the same time."""
    ordered = order_by_start(folders)
    for before, after in pairwise(ordered):
        began, ended = began_unix_ns(after), last_end_unix_ns(before)
        if began is None or began < ended or not ended:
            raise UsageError(
                f"rank {number} is in {whose[before].source} and in {whose[after].source}, and "
                "they differ: these are not parts of one job"
            )
    return ordered


def list_copies(
    runs: Sequence[RunSource], targets: dict[tuple[int, str], str], *, everything: bool
) -> tuple[list[FileCopy], list[SourceFile]]:
    """What to copy, windows of traces included; and what is left out because nobody reads it."""
    copies: dict[str, FileCopy] = {}
    left_out = []
    for place, run in enumerate(runs):
        for file in run.files:
            target = _target(place, file.name, targets)
            if target is None or not is_safe(target):
                continue
            if not everything and not is_needed(target):
                left_out.append(file)
                continue
            if target in copies:
                if copies[target].file.size_bytes == file.size_bytes or "/" in target:
                    continue  # another copy of it
                target = f"{place}-{target}"  # hosts may give their logs the same name
            copies[target] = FileCopy(source=run.source, file=file, target=target)
    return list(copies.values()), left_out


def _target(place: int, name: str, targets: dict[tuple[int, str], str]) -> str | None:
    folder, slash, rest = name.partition("/")
    if name in _OWN or _UNFINISHED.fullmatch(Path(name).name):
        return None
    if slash and folder_rank(Path(folder)) is not None:
        chosen = targets.get((place, folder))
        return f"{chosen}/{rest}" if chosen else None
    return name


def is_safe(name: str) -> bool:
    """Whether the name stays inside the run folder."""
    parts = name.split("/")
    return bool(name) and "\0" not in name and all(part not in ("", ".", "..") for part in parts)


def is_needed(name: str) -> bool:
    """Whether `explain` reads it."""
    folder, _, last = name.rpartition("/")
    if folder == HOSTS:
        return last.endswith(".json")
    if "/" in folder:
        return False
    if folder:
        known = is_side_file(last) or window_number(last) is not None
        return folder_rank(Path(folder)) is not None and (known or is_log_name(last))
    return name == RUN or is_log_name(name)
