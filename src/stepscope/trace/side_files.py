"""Files that capture writes beside a trace, as records: JSON, or JSON lines.

Each may be missing, cut short, damaged or not a file at all. What can be read is read; the rest is
counted as not captured.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.trace.decode import UNFIT, NotJsonError, brief, decode, decode_leniently, fit
from stepscope.trace.regular_files import MAX_FILE_BYTES, LineFile, MissingFileError, read_whole

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.trace.decode import Oddities

_T = TypeVar("_T")


def read_record(
    file: Path, kind: type[_T], oddities: Oddities, max_bytes: int = MAX_FILE_BYTES
) -> _T | None:
    """The whole file as one record; None where it was not captured or says nothing."""
    try:
        text = read_whole(file, max_bytes)
    except MissingFileError:
        return None
    except UnreadableInputError as error:
        oddities.unread(str(error))
        return None
    with contextlib.suppress(NotJsonError):
        return decode(text, kind)
    return _fitted(text, kind, oddities)


def _fitted(text: bytes, kind: type[_T], oddities: Oddities) -> _T | None:
    """What can be kept of a record that is not all as it should be."""
    try:
        value = decode_leniently(text[:MAX_FILE_BYTES])
    except NotJsonError as error:
        oddities.unread(str(error))
        return None
    if not isinstance(value, dict):
        oddities.unread(f"it holds {brief(value)} and no object")
        return None
    found = fit(value, kind, "", oddities)
    return None if found is UNFIT else found


def read_rows(file: Path, kind: type[_T], oddities: Oddities) -> list[_T]:
    """One record a line. A last line that a kill cut short is left out and not counted."""
    lines = LineFile(file)
    decoder = msgspec.json.Decoder(kind)
    rows = []
    try:
        for line in lines:
            try:
                rows.append(decoder.decode(line.text))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                row = _row(line.text, line.number, line.ended, kind, oddities)
                if row is not UNFIT:
                    rows.append(row)
    except MissingFileError:
        return []
    except UnreadableInputError as error:
        oddities.unread(str(error))
    if lines.too_long:
        oddities.left_out(f"lines of over {lines.max_line_bytes >> 20} MiB", lines.too_long)
    if lines.is_cut:
        oddities.left_out(
            f"only its beginning was read, {len(rows):,} lines; at most {lines.max_lines:,} lines "
            f"and {lines.max_bytes >> 20} MiB are"
        )
    return rows


def _row(text: bytes, number: int, ended: bool, kind: Any, oddities: Oddities) -> Any:
    try:
        value = decode_leniently(text)
    except NotJsonError as error:
        if ended:
            oddities.add(f"line {number}", str(error))
        return UNFIT
    return fit(value, kind, f"line {number}", oddities)
