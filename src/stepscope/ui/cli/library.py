"""stepscope library: show, export or import the operator times that probes measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepscope.errors import StepscopeError, UnreadableInputError
from stepscope.text.words import counted
from stepscope.ui.cli.options import VerbCommand, VerbGroup, json_option
from stepscope.ui.json_text import write_json
from stepscope.ui.user_input import writing

if TYPE_CHECKING:
    from stepscope.records.hardware import OperatorTime

_SCHEMA = 1


_EXPORT = "stepscope probe export times.json"
_IMPORT = "stepscope probe import times.json"


@click.group(
    cls=VerbGroup,
    name="library",
    newer="stepscope probe show, probe export FILE, probe import FILE",
    examples=(
        ("stepscope probe show", "Count the operator times of this machine"),
        (_EXPORT, "Write them to a file, for another machine"),
    ),
)
def command() -> None:
    """Show the operator times that probes measured, or carry them to another machine as a file."""


@command.command(
    cls=VerbCommand,
    examples=(
        ("stepscope probe show", "Count the operator times of this machine"),
        ("stepscope probe show --json", "The same, for a program"),
    ),
)
@json_option
def show(as_json: bool) -> None:
    """Count the measured operator times by device, software and precision."""
    times = _read()
    if as_json:
        from stepscope.ui.topics.measurements import library_json

        write_json(library_json(times))
        return
    from stepscope.ui.terminal.measurements import print_library

    print_library(times)


@command.command(
    cls=VerbCommand,
    examples=(
        (_EXPORT, "Write the times of this machine to a file"),
        (_IMPORT, "Then read them on another machine"),
    ),
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def export(file: Path) -> None:
    """Write all operator times to FILE, as JSON."""
    import msgspec

    from stepscope.records.hardware import TimesFile

    times = _read()
    with writing(file):
        file.write_bytes(msgspec.json.encode(TimesFile(schema=_SCHEMA, times=tuple(times))))
    click.echo(f"{counted(_timed(times), 'operator time')} written to {file}")


@command.command(
    name="import",
    cls=VerbCommand,
    examples=(
        (_EXPORT, "Write the times of one machine to a file"),
        (_IMPORT, "Then read them on this machine"),
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
def import_(file: Path) -> None:
    """Add the operator times of FILE, which `probe export` wrote."""
    from msgspec.structs import replace

    from stepscope.predict.operator_library import LibraryProblemError, save_times
    from stepscope.records.hardware import TimesFile
    from stepscope.trace.decode import NotJsonError, decode
    from stepscope.trace.files import read_whole

    try:
        times = decode(read_whole(file), TimesFile)
    except NotJsonError as error:
        raise UnreadableInputError(
            f"{file} is not a file of `stepscope probe export`: {error}"
        ) from None
    if times.schema != _SCHEMA:
        raise UnreadableInputError(f"{file}: a newer stepscope wrote it (schema {times.schema})")
    try:
        save_times([replace(time, source=file.name) for time in times.times])
    except LibraryProblemError as problem:
        raise StepscopeError(str(problem)) from None
    click.echo(f"{counted(_timed(times.times), 'operator time')} added from {file}")


def _timed(times: Sequence[OperatorTime]) -> int:
    """Others only say what a call returns."""
    return sum(time.forward is not None for time in times)


def _read() -> list[OperatorTime]:
    from stepscope.predict.operator_library import LibraryProblemError, read_times

    try:
        return read_times()
    except LibraryProblemError as problem:
        raise UnreadableInputError(str(problem)) from None
