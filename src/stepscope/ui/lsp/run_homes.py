"""Run folders of a script: found by their command, claimed so that two servers never share one."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import StepscopeError
from stepscope.measure.folder import HOME
from stepscope.trace.regular_files import list_folder, may_exist
from stepscope.trace.run_origin import RUN, read_origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MOST_LOOKED_AT = 200  # the newest, in each home
_KEPT = 10  # runs that editors made of one script
_SUFFIX = "-editor"
_MADE_HERE = re.compile(rf"\d{{8}}-\d{{6}}-(.*){_SUFFIX}-\d+(?:-\d+)?")


def new_editor_run(script: Path) -> Path:
    """The path of a new run beside the script, which nothing has yet; the profile makes it.

    Two servers have two process numbers. OSError if nothing can be written there.
    """
    home = script.parent / HOME
    home.mkdir(exist_ok=True)  # a script that was never saved may have no folder either
    if not os.access(home, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(home))
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", script.stem)[:40]
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}{_SUFFIX}-{os.getpid()}"
    names = (base if number == 1 else f"{base}-{number}" for number in count(1))
    return next(path for name in names if not (path := home / name).exists())


def discard_run(folder: Path) -> None:
    """Remove a folder that `new_editor_run` made and that nobody needs."""
    shutil.rmtree(folder, ignore_errors=True)


def discard_old_runs(newest: Path) -> None:
    """Profiling at every save must not fill the disk: keep the last few of those made here."""
    with contextlib.suppress(OSError):
        runs = [run for run in newest.parent.iterdir() if _stem(run) == _stem(newest)]
        for run in sorted(runs, key=_age_key, reverse=True)[_KEPT:]:
            discard_run(run)


def _stem(run: Path) -> str | None:
    """Of the script; None for a run that no editor made."""
    match = _MADE_HERE.fullmatch(run.name)
    return match[1] if match else None


def find_runs(script: Path, roots: Iterable[Path]) -> list[Path]:
    """Finished runs of this script beside it and in the workspace's roots, newest first."""
    runs = []
    for home in dict.fromkeys((script.parent / HOME, *(root / HOME for root in roots))):
        with contextlib.suppress(StepscopeError, OSError):
            folders = [one for one in list_folder(home) if may_exist(one / RUN)]
            folders.sort(key=_age_key, reverse=True)
            runs += [one for one in folders[:_MOST_LOOKED_AT] if _is_of(one, script)]
    return sorted(runs, key=_age_key, reverse=True)


def _age_key(run: Path) -> tuple[float, str]:
    try:
        return (run / RUN).stat().st_mtime, run.name
    except OSError:
        return 0.0, run.name


def _is_of(run: Path, script: Path) -> bool:
    origin = read_origin(run)
    if origin is None or not any(run.glob("rank-*")):
        return False
    return _script_of(origin.command, origin.folder) == script


def _script_of(command: Sequence[str], folder: str | None) -> Path | None:
    named = next((word for word in command if word.endswith(".py")), None)
    if named is None:
        return None
    try:
        return (Path(folder or ".") / named).resolve()
    except (OSError, ValueError):
        return None
