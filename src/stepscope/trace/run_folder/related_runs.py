"""Find what else was run of a run's command: its tune (tune.json), and runs of the same
script beside it, as in a search.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.records.comparison import TuneResult
from stepscope.records.job import SimilarRuns
from stepscope.records.run import RunOrigin
from stepscope.text.words import lazy_pattern
from stepscope.trace.decode import NotJsonError, decode, read_record
from stepscope.trace.files import is_folder, list_folder, may_exist, read_whole
from stepscope.trace.remote import is_url
from stepscope.trace.run_folder.rank_folder import MEMORY
from stepscope.trace.run_folder.run_state import RUN, read_origin

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
        result = read_record(file, TuneResult)
    if result is None:
        raise UnreadableInputError(f"{file} cannot be read as a tune's result")
    return result


def find_tune(run: Path, origin: RunOrigin) -> FoundTune | None:
    """The newest tune of the run's command: one that the run is part of, or one beside it."""
    if not origin.command:
        return None
    # The tune that made this run: it is the baseline or a trial there.
    around = [folder for folder in run.absolute().parents[:2] if is_tune_folder(folder)]
    newest = sorted(_beside(run, origin), key=_written, reverse=True)[:_MOST_TUNES]
    for folder in (*around, *newest):
        with contextlib.suppress(UnreadableInputError):
            result = read_tune(folder)
            # The same words, in the same working folder where both are known.
            same_folder = not result.folder or not origin.folder or result.folder == origin.folder
            if result.command == origin.command and same_folder:
                return FoundTune(folder, result, holds_run=folder in around)
    return None


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


def _written(folder: Path) -> float:
    try:
        return (folder / TUNE).stat().st_mtime
    except OSError:
        return 0.0


# Runs of the same script beside a run: is it one of a search?
#
# The runs of a search differ in numbers: learning rates, seeds, the number in a run's name. Runs
# that differ in words compare other things, such as models or ways to train them. Runs whose
# weights need another number of bytes train another model, whatever their arguments say.

_MOST_RUNS = 64  # beside it that are looked at, the newest by name
# Options of scripts that somebody starts many times.
_SEARCH = lazy_pattern(
    r"^-{0,2}(\w*[-_.])?(seed|trial|sweep|fold|multirun)([-_.]\w*)?$", re.IGNORECASE
)
_SCRIPT = ".py"
_NUMBER = lazy_pattern(r"[-+]?\d[\d.]*(e[-+]?\d+)?", re.IGNORECASE)


class _Weights(msgspec.Struct, frozen=True):
    """The part of memory.json that tells one model from another."""

    categories: dict[str, int | None] | None = None


def find_similar_runs(rank: Path) -> SimilarRuns | None:
    """Find runs like the one of this rank's folder; None if its script is not known."""
    run = rank.parent
    command = _command(run)
    script = _script(command)
    if script is None:
        return None
    try:
        others = [one for one in list_folder(run.parent) if one != run and may_exist(one / RUN)]
    except UnreadableInputError:
        others = []
    own, weights = _arguments(command), _weights_bytes(rank)
    arguments = {
        _values(theirs)
        for one in sorted(others, reverse=True)[:_MOST_RUNS]
        if _script(words := _command(one)) == script
        and _shape(theirs := _arguments(words)) == _shape(own)
        and _weights_bytes(one / rank.name) in (None, weights)
    }
    names = [word.partition("=")[0] for word in own]
    return SimilarRuns(
        script=Path(script).name,
        count=len(arguments - {_values(own)}),
        options=tuple(dict.fromkeys(name for name in names if _SEARCH.search(name))),
    )


def _command(run: Path) -> tuple[str, ...]:
    origin = read_origin(run)
    return origin.command if origin else ()


def _script(command: Sequence[str]) -> str | None:
    return next((word for word in command if word.endswith(_SCRIPT)), None)


def _arguments(command: Sequence[str]) -> tuple[str, ...]:
    """Return what follows the script."""
    script = _script(command)
    return tuple(command[command.index(script) + 1 :]) if script else ()


def _values(arguments: Sequence[str]) -> tuple[str, ...]:
    """Leave out paths: where a run writes makes no difference."""
    return tuple(word for word in arguments if not _is_path(word))


def _shape(arguments: Sequence[str]) -> tuple[str, ...]:
    """Replace each path and each number by a sign."""
    return tuple("/" if _is_path(word) else _NUMBER.sub("#", word) for word in arguments)


def _is_path(word: str) -> bool:
    return "/" in word or os.sep in word


def _weights_bytes(rank: Path) -> int | None:
    """Return None where memory was not captured."""
    known = read_record(rank / MEMORY, _Weights)
    return ((known and known.categories) or {}).get("parameters")
