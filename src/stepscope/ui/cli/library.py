"""stepscope library: the operator times that probes have measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepscope.errors import StepscopeError, UnreadableInputError, UsageError
from stepscope.records.words import counted
from stepscope.ui.cli.options import json_option
from stepscope.ui.json_text import write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.operator_times import OperatorTime

_SCHEMA = 1


@click.group(name="library")
def command() -> None:
    """Show the library of operator times, or carry it to another machine as a file."""


@command.command()
@json_option
def show(as_json: bool) -> None:
    """Count the library's times by device, software and precision."""
    times = _read()
    if as_json:
        from stepscope.ui.probe_json import library_json

        write_json(library_json(times))
        return
    from stepscope.ui.terminal.probe import print_library

    print_library(times)


@command.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def export(file: Path) -> None:
    """Write all times to FILE, as JSON."""
    import msgspec

    from stepscope.records.operator_times import TimesFile

    times = _read()
    try:
        file.write_bytes(msgspec.json.encode(TimesFile(schema=_SCHEMA, times=tuple(times))))
    except OSError as error:
        raise UsageError(f"{file} could not be written: {error.strerror}") from None
    click.echo(f"{counted(_timed(times), 'operator time')} written to {file}")


@command.command(name="import")
@click.argument("file", type=click.Path(path_type=Path))
def import_(file: Path) -> None:
    """Add the times of FILE, which `library export` wrote, to the library."""
    from msgspec.structs import replace

    from stepscope.predict.operator_library import LibraryProblemError, save_times
    from stepscope.records.operator_times import TimesFile
    from stepscope.trace.decode import NotJsonError, decode
    from stepscope.trace.regular_files import read_whole

    try:
        times = decode(read_whole(file), TimesFile)
    except NotJsonError as error:
        raise UnreadableInputError(
            f"{file} is no file of `stepscope library export`: {error}"
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
