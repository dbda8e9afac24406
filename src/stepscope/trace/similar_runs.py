"""Runs of the same script beside a run: is it one of a search?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import UnreadableInputError
from stepscope.records.job import SimilarRuns
from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.trace.regular_files import list_folder, may_exist
from stepscope.trace.run_origin import RUN, read_origin

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_RUNS = 64  # beside it that are looked at, the newest by name
# Options of scripts that somebody starts many times.
_SEARCH = lazy_pattern(
    r"^-{0,2}(\w*[-_.])?(seed|trial|sweep|fold|multirun)([-_.]\w*)?$", re.IGNORECASE
)
_SCRIPT = ".py"


def find_similar_runs(rank: Path) -> SimilarRuns | None:
    """Of the run that this rank's folder is in; None if its script is not known."""
    run = rank.parent
    command = _command(run)
    script = _script(command)
    if script is None:
        return None
    try:
        others = [one for one in list_folder(run.parent) if one != run and may_exist(one / RUN)]
    except UnreadableInputError:
        others = []
    commands = [_command(one) for one in sorted(others, reverse=True)[:_MOST_RUNS]]
    arguments = {_arguments(one) for one in commands if _script(one) == script}
    own = _arguments(command)
    names = [word.partition("=")[0] for word in own]
    return SimilarRuns(
        script=Path(script).name,
        count=len(arguments - {own}),
        options=tuple(dict.fromkeys(name for name in names if _SEARCH.search(name))),
    )


def _command(run: Path) -> tuple[str, ...]:
    origin = read_origin(run) if may_exist(run / RUN) else None
    return origin.command if origin else ()


def _script(command: Sequence[str]) -> str | None:
    return next((word for word in command if word.endswith(_SCRIPT)), None)


def _arguments(command: Sequence[str]) -> tuple[str, ...]:
    """What follows the script."""
    script = _script(command)
    return tuple(command[command.index(script) + 1 :]) if script else ()
