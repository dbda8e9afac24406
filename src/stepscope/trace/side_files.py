"""The files that capture writes next to a trace, as records: JSON, or JSON lines.

Each may be missing, cut short, damaged or not a file at all. What can be read is read; the rest is
counted as not captured.
"""

from __future__ import annotations

import contextlib
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.records import figures
from stepscope.records.words import counted
from stepscope.trace.decode import (
    DECODE_ERRORS,
    UNFIT,
    NotJsonError,
    brief,
    decode,
    decode_leniently,
    fit,
)
from stepscope.trace.regular_files import MAX_FILE_BYTES, LineFile, MissingFileError, read_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stepscope.trace.decode import Oddities
    from stepscope.trace.regular_files import FileLine

_T = TypeVar("_T")
_BATCH_LINES = 4096


def read_record(
    file: Path, kind: type[_T], oddities: Oddities, max_bytes: int = MAX_FILE_BYTES
) -> _T | None:
    """The whole file as one record; None if it was not captured or cannot be read."""
    try:
        text = read_whole(file, max_bytes)
    except MissingFileError:
        return None
    except UnreadableInputError as error:
        oddities.unread(str(error))
        return None
    with contextlib.suppress(NotJsonError):
        return decode(text, kind)
    return _fit_text(text, kind, oddities)


def _fit_text(text: bytes, kind: type[_T], oddities: Oddities) -> _T | None:
    """The values of a record that make sense."""
    try:
        value = decode_leniently(text[:MAX_FILE_BYTES])
    except NotJsonError as error:
        oddities.unread(str(error))
        return None
    if not isinstance(value, dict):
        oddities.unread(f"it holds {brief(value)}, not an object")
        return None
    record = fit(value, kind, "", oddities)
    return None if record is UNFIT else record


def read_rows(file: Path, kind: type[_T], oddities: Oddities) -> list[_T]:
    """One record per line. A last line that was cut short is left out and not counted."""
    batches = read_row_batches(LineFile(file), kind, oddities)
    return [row for batch in batches for row in batch]


def read_row_batches(lines: LineFile, kind: type[_T], oddities: Oddities) -> Iterator[list[_T]]:
    """The rows of `read_rows`, a few thousand at a time."""
    decoder = msgspec.json.Decoder(kind)
    rows = 0
    try:
        numbered = iter(lines)
        while batch := list(islice(numbered, _BATCH_LINES)):
            decoded = _decode_batch(batch, decoder, kind, oddities)
            rows += len(decoded)
            yield decoded
    except MissingFileError:
        return
    except UnreadableInputError as error:
        oddities.unread(str(error))
    if lines.too_long:
        longest = figures.size(lines.max_line_bytes)
        oddities.left_out(
            f"left out {counted(lines.too_long, 'line')} of over {longest}", lines.too_long
        )
    if lines.is_cut:
        oddities.left_out(
            f"only its first {counted(rows, 'line')} were read; the limits are "
            f"{lines.max_lines:,} lines and {figures.size(lines.max_bytes)}"
        )


def _decode_batch(
    batch: list[FileLine], decoder: msgspec.json.Decoder[_T], kind: type[_T], oddities: Oddities
) -> list[_T]:
    decode_line = decoder.decode
    with contextlib.suppress(*DECODE_ERRORS):
        return [decode_line(line.text) for line in batch]
    rows = []
    for line in batch:
        try:
            rows.append(decode_line(line.text))
        except DECODE_ERRORS:
            row = _fit_line(line, kind, oddities)
            if row is not UNFIT:
                rows.append(row)
    return rows


def _fit_line(line: FileLine, kind: Any, oddities: Oddities) -> Any:
    try:
        value = decode_leniently(line.text)
    except NotJsonError as error:
        if line.ended:
            oddities.add(f"line {line.number}", str(error))
        return UNFIT
    return fit(value, kind, f"line {line.number}", oddities)
