"""Decode JSON and JSON lines that other programs wrote: what makes no sense counts as not
captured, and whatever is wrong with a text is one kind of error.
"""

from __future__ import annotations

import contextlib
import math
import reprlib
import types
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.records.quality import Note
from stepscope.text import figures
from stepscope.text.words import counted
from stepscope.trace.files import MAX_FILE_BYTES, FileLine, LineFile, MissingFileError, read_whole

# `decode` accepts or refuses a text. `fit` keeps the values of a record that make sense, and hands
# the others to an `Oddities`, which counts them.

_T = TypeVar("_T")
_BOM = b"\xef\xbb\xbf"
_LONGEST_NUMBER = 40  # characters; int() of thousands of digits takes long
# All that decoding damaged, oddly typed or too deeply nested JSON may raise.
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
UNFIT: Any = object()


class NotJsonError(ValueError):
    """The text is not JSON, or not of the kind that was asked for."""


def decode(text: bytes, kind: type[_T]) -> _T:
    """The whole text as one value of this kind."""
    try:
        return msgspec.json.decode(text.removeprefix(_BOM), type=kind)
    except DECODE_ERRORS as error:
        raise NotJsonError(_reason(error)) from None


class Oddities:
    """The values of one file that make no sense: how many, and the first of them."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.count = 0
        self.first = ""
        self._notes: list[Note] = []

    def add(self, place: str, why: str, count: int = 1) -> None:
        """Count one value, or one line, as not captured; of several, `place` is the first."""
        self.count += count
        self.first = self.first or f"{place}: {why}"

    def unread(self, why: str) -> None:
        """The whole file could not be read."""
        detail = f"{self.file} could not be read: {why}"
        self._notes.append(Note(id="side-file-unreadable", detail=detail))

    def left_out(self, why: str, count: int | None = None) -> None:
        """A part of the file was not read."""
        self._notes.append(Note(id="side-file-cut", detail=f"{self.file}: {why}", count=count))

    def also(self, note: Note) -> None:
        """Something else to know about the file."""
        self._notes.append(note)

    @property
    def notes(self) -> tuple[Note, ...]:
        """Return the notes for a record's `quality`."""
        if not self.count:
            return tuple(self._notes)
        odd = Note(
            id="side-file-values",
            detail=f"{self.file}: {counted(self.count, 'value')} that cannot be true; they count "
            f"as not captured. The first is {self.first}",
            count=self.count,
        )
        return (*self._notes, odd)


def decode_leniently(text: bytes) -> Any:
    """Decode any JSON; bytes and numbers that make no sense are replaced, not the file refused."""
    text = text.removeprefix(_BOM)
    try:
        return msgspec.json.decode(text)
    except DECODE_ERRORS as error:
        first = error
    try:
        import json

        value = json.loads(
            text.decode("utf-8", "replace"),
            parse_int=_integer,
            parse_float=_number,
            parse_constant=str,
        )
        # Half of a surrogate pair cannot be written again.
        return msgspec.json.decode(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise NotJsonError(_reason(first)) from None


def fit(value: Any, kind: Any, place: str, oddities: Oddities) -> Any:
    """The value as this kind, without the parts that do not fit; UNFIT if nothing fits."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        why = str(error)
    except (RecursionError, OverflowError):
        why = "nested too deeply or too large"
    for choice in _choices(kind):
        parts = _fit_parts(value, choice, place, oddities)
        if parts is not None:
            return parts
    oddities.add(place, f"{brief(value)} ({why})")
    return UNFIT


def brief(value: Any) -> str:
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


def _fit_parts(value: Any, kind: Any, place: str, oddities: Oddities) -> Any:
    """Return None if this kind has no parts, or the value has others."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(value, dict):
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return _fit_struct(value, kind, place, oddities)
        if origin is dict:
            pairs = {
                key: fit(item, inner[1], _inside(place, key), oddities)
                for key, item in value.items()
            }
            return {key: item for key, item in pairs.items() if item is not UNFIT}
    is_sequence = origin is list or (origin is tuple and inner[1:] == (...,))
    if isinstance(value, list) and is_sequence:
        items = [
            fit(item, inner[0], f"{place}[{number}]", oddities) for number, item in enumerate(value)
        ]
        return origin(item for item in items if item is not UNFIT)
    return None


def _fit_struct(value: dict[str, Any], kind: Any, place: str, oddities: Oddities) -> Any:
    """Give a value that does not fit its default; UNFIT if it has none."""
    values = {}
    for field in msgspec.structs.fields(kind):
        if field.encode_name in value:
            inside = _inside(place, field.encode_name)
            fitted = fit(value[field.encode_name], field.type, inside, oddities)
            if fitted is not UNFIT:
                values[field.name] = fitted
                continue
            if field.required:
                return UNFIT
        elif field.required:
            oddities.add(place or "the record", f"{field.encode_name} is missing")
            return UNFIT
    return kind(**values)


def _choices(kind: Any) -> tuple[Any, ...]:
    """The types that a value may have, without bounds."""
    if get_origin(kind) is Annotated:
        return _choices(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(choice for member in get_args(kind) for choice in _choices(member))
    return (kind,)


def _inside(place: str, key: str) -> str:
    key = key if len(key) < _LONGEST_NUMBER else f"{key[:_LONGEST_NUMBER]}…"
    return f"{place}.{key}" if place else key


def _integer(text: str) -> int | str:
    return int(text) if len(text) <= _LONGEST_NUMBER else f"{text[:_LONGEST_NUMBER]}…"


def _number(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else f"{text[:_LONGEST_NUMBER]}…"


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return str(error)


# The files that capture writes next to a trace, as records: JSON, or JSON lines.
#
# Each may be missing, cut short, damaged or not a file at all. What can be read is read; the rest
# is counted as not captured.

_BATCH_LINES = 4096


def read_record(
    file: Path, kind: type[_T], oddities: Oddities | None = None, max_bytes: int = MAX_FILE_BYTES
) -> _T | None:
    """Return the whole file as one record; None if it was not captured or cannot be read.

    Without `oddities` nobody hears what was odd about it: another reader of the file says so.
    """
    oddities = oddities or Oddities(file.name)
    try:
        text = read_whole(file, max_bytes)
    except MissingFileError:
        return None
    except UnreadableInputError as error:
        oddities.unread(str(error))
        return None
    with contextlib.suppress(NotJsonError):
        return decode(text, kind)
    # The values of a record that make sense.
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
