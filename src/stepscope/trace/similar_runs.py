"""Runs of the same script beside a run: is it one of a search?

The runs of a search differ in numbers: learning rates, seeds, the number in a run's name. Runs that
differ in words compare other things, such as models or ways to train them. Runs whose weights need
another number of bytes train another model, whatever their arguments say.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.records.job import SimilarRuns
from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.trace.decode import Oddities
from stepscope.trace.rank_folder import MEMORY
from stepscope.trace.regular_files import list_folder, may_exist
from stepscope.trace.run_origin import RUN, read_origin
from stepscope.trace.side_files import read_record

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    origin = read_origin(run) if may_exist(run / RUN) else None
    return origin.command if origin else ()


def _script(command: Sequence[str]) -> str | None:
    return next((word for word in command if word.endswith(_SCRIPT)), None)


def _arguments(command: Sequence[str]) -> tuple[str, ...]:
    """What follows the script."""
    script = _script(command)
    return tuple(command[command.index(script) + 1 :]) if script else ()


def _values(arguments: Sequence[str]) -> tuple[str, ...]:
    """Without paths: where a run writes makes no difference."""
    return tuple(word for word in arguments if not _is_path(word))


def _shape(arguments: Sequence[str]) -> tuple[str, ...]:
    """With a sign for each path and each number."""
    return tuple("/" if _is_path(word) else _NUMBER.sub("#", word) for word in arguments)


def _is_path(word: str) -> bool:
    return "/" in word or os.sep in word


def _weights_bytes(rank: Path) -> int | None:
    """None where memory was not captured."""
    known = read_record(rank / MEMORY, _Weights, Oddities(MEMORY))
    return ((known and known.categories) or {}).get("parameters")
