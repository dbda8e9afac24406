"""How the command of a run failed, as run.json and the job's processes tell.

Every process of the job appends to its host's file; the one whose exception came first is the
cause: launchers and other ranks raise errors of their own about it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.records.failed_command import FailedCommand
from stepscope.records.host_names import processes_files
from stepscope.records.place import Place
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.regular_files import LineFile
from stepscope.trace.run_state import signal_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FAILED = "failed"
_MOST_HOSTS = 64


class _ProcessLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a process wrote when an exception ended it."""

    event: str = ""
    unix: float = 0.0
    exception: str | None = None
    file: str | None = None
    line: int | None = None
    function: str | None = None
    steps: int | None = None
    rank: int | None = None


def find_failure(run: Path, exit_code: int | None) -> FailedCommand | None:
    """None for a command that ended well, or has not ended."""
    if not exit_code:
        return None
    first = min(_exceptions(run), key=lambda line: line.unix, default=_ProcessLine())
    place = None
    if first.file:
        place = Place(file=first.file, line=first.line or 0, function=first.function or "")
    return FailedCommand(
        exit_code=exit_code,
        signal=signal_name(exit_code),
        exception=first.exception,
        place=place,
        step=first.steps,
        rank=first.rank,
    )


def _exceptions(run: Path) -> Iterator[_ProcessLine]:
    for file in processes_files(run, _MOST_HOSTS):
        with contextlib.suppress(UnreadableInputError):
            for line in LineFile(file):
                with contextlib.suppress(NotJsonError):
                    found = decode(line.text, _ProcessLine)
                    if found.event == _FAILED:
                        yield found
