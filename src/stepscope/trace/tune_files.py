"""tune.json: read from a tune folder, and found beside a run of the same command."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.records.tuning import TuneResult
from stepscope.trace.decode import NotJsonError, Oddities, decode
from stepscope.trace.regular_files import is_folder, list_folder, may_exist, read_whole
from stepscope.trace.remote import is_url
from stepscope.trace.side_files import read_record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.records.applied_remedy import RunOrigin

TUNE = "tune.json"
JOURNAL, TRIALS = "journal.jsonl", "trials"  # there from the first trial on
BASELINE = "baseline"  # the traced run that a tune starts with
_MOST_FOLDERS = 2000  # looked into for a tune.json
_MOST_TUNES = 48  # read, the newest first


class FoundTune(NamedTuple):
    folder: Path
    result: TuneResult
    holds_run: bool = False  # the run that it was looked for is its baseline, or a trial of it


def traced_run(path: str | Path) -> str | Path:
    """The baseline of a tune folder; any other path as it is."""
    if is_url(str(path)) or not is_tune_folder(Path(path)):
        return path
    run = Path(path) / BASELINE
    if not is_folder(run):
        raise NotCapturedError(f"{path} is a tune without a captured baseline: nothing to explain")
    return run


def is_tune_folder(path: Path) -> bool:
    return is_folder(path) and may_exist(path / TUNE)


def read_tune(folder: Path) -> TuneResult:
    """The whole file, or an UnreadableInputError that says why not."""
    file = folder / TUNE
    try:
        return decode(read_whole(file), TuneResult)
    except NotJsonError:
        oddities = Oddities(TUNE)
        result = read_record(file, TuneResult, oddities)
    if result is None:
        raise UnreadableInputError(f"{file} cannot be read as a tune's result")
    return result


def find_tune(run: Path, origin: RunOrigin) -> FoundTune | None:
    """The newest tune of the run's command: one that the run is part of, or one beside it."""
    if not origin.command:
        return None
    around = _around(run)
    for folder in (*around, *_newest_first(_beside(run, origin))):
        with contextlib.suppress(UnreadableInputError):
            result = read_tune(folder)
            if _same_command(result, origin):
                return FoundTune(folder, result, holds_run=folder in around)
    return None


def _around(run: Path) -> list[Path]:
    """The tune that made this run: it is the baseline or a trial there."""
    return [folder for folder in run.absolute().parents[:2] if is_tune_folder(folder)]


def _beside(run: Path, origin: RunOrigin) -> list[Path]:
    """Folders next to the run, and those where `tune` puts its own."""
    homes = [run.absolute().parent]
    if origin.folder:
        homes.append(Path(origin.folder) / "stepscope-runs")
    folders = [
        folder
        for home in dict.fromkeys(homes)
        if is_folder(home)
        for folder in sorted(list_folder(home), reverse=True)[:_MOST_FOLDERS]
    ]
    return [folder for folder in dict.fromkeys(folders) if is_tune_folder(folder)]


def _newest_first(folders: Iterable[Path]) -> list[Path]:
    return sorted(folders, key=_written, reverse=True)[:_MOST_TUNES]


def _written(folder: Path) -> float:
    try:
        return (folder / TUNE).stat().st_mtime
    except OSError:
        return 0.0


def _same_command(result: TuneResult, origin: RunOrigin) -> bool:
    """The same words, in the same working folder where both are known."""
    same_folder = not result.folder or not origin.folder or result.folder == origin.folder
    return result.command == origin.command and same_folder
