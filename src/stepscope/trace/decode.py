"""JSON of others, decoded: whatever is wrong with it is one kind of error.

`decode` takes or refuses a text. `fit` goes on where it can: of a record whose values do not all
make sense it keeps those that do, and hands the others to an `Oddities`, which counts them.
"""

from __future__ import annotations

import math
import reprlib
import types
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec

from stepscope.records.quality import Note
from stepscope.records.words import counted

_T = TypeVar("_T")
_BOM = b"\xef\xbb\xbf"
_LONGEST_NUMBER = 40  # characters; int() of thousands takes long, and nothing has so many
_FAILURES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
UNFIT: Any = object()


class NotJsonError(ValueError):
    """The text is no JSON, or not of the kind that was asked for."""


def decode(text: bytes, kind: type[_T]) -> _T:
    """All of it as one value of this kind."""
    try:
        return msgspec.json.decode(text.removeprefix(_BOM), type=kind)
    except _FAILURES as error:
        raise NotJsonError(_words(error)) from None


class Oddities:
    """What one file says that makes no sense: how often, and the first of it."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.count = 0
        self.first = ""
        self._notes: list[Note] = []

    def add(self, place: str, why: str) -> None:
        """One value, or one line, that counts as not captured."""
        self.count += 1
        self.first = self.first or f"{place}: {why}"

    def unread(self, why: str) -> None:
        """The file as a whole says nothing."""
        detail = f"{self.file} could not be read: {why}"
        self._notes.append(Note(id="side-file-unreadable", detail=detail))

    def left_out(self, why: str, count: int | None = None) -> None:
        """A part of it was not even looked at."""
        self._notes.append(Note(id="side-file-cut", detail=f"{self.file}: {why}", count=count))

    @property
    def notes(self) -> tuple[Note, ...]:
        """For `quality`."""
        if not self.count:
            return tuple(self._notes)
        odd = Note(
            id="side-file-values",
            detail=f"{self.file}: {counted(self.count, 'value')} that cannot be true left out as "
            f"not captured; the first is {self.first}",
            count=self.count,
        )
        return (*self._notes, odd)


def decode_patiently(text: bytes) -> Any:
    """Any JSON. Bytes that are no text and numbers that are none cost themselves, not the file."""
    text = text.removeprefix(_BOM)
    try:
        return msgspec.json.decode(text)
    except _FAILURES as error:
        first = error
    try:
        import json

        value = json.loads(
            text.decode("utf-8", "replace"),
            parse_int=_integer,
            parse_float=_number,
            parse_constant=str,
        )
        # A surrogate without its other half is in no text that can be written again.
        return msgspec.json.decode(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise NotJsonError(_words(first)) from None


def fit(value: Any, kind: Any, place: str, oddities: Oddities) -> Any:
    """The value as this kind, without those of its parts that do not fit; UNFIT if none does."""
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
    oddities.add(place, f"{shown(value)} ({why})")
    return UNFIT


def shown(value: Any) -> str:
    """Short, whatever it is."""
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


def _fit_parts(value: Any, kind: Any, place: str, oddities: Oddities) -> Any:
    """None where this kind has no parts, or the value has others."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(value, dict):
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return _fit_struct(value, kind, place, oddities)
        if origin is dict:
            pairs = {
                key: fit(each, inner[1], _inside(place, key), oddities)
                for key, each in value.items()
            }
            return {key: each for key, each in pairs.items() if each is not UNFIT}
    several = origin is list or (origin is tuple and inner[1:] == (...,))
    if isinstance(value, list) and several:
        items = [
            fit(each, inner[0], f"{place}[{number}]", oddities) for number, each in enumerate(value)
        ]
        return origin(each for each in items if each is not UNFIT)
    return None


def _fit_struct(value: dict[str, Any], kind: Any, place: str, oddities: Oddities) -> Any:
    """With its defaults where a value does not fit; UNFIT where one without a default does not."""
    found = {}
    for field in msgspec.structs.fields(kind):
        if field.encode_name in value:
            inside = _inside(place, field.encode_name)
            fitted = fit(value[field.encode_name], field.type, inside, oddities)
            if fitted is not UNFIT:
                found[field.name] = fitted
                continue
            if field.required:
                return UNFIT
        elif field.required:
            oddities.add(place or "the record", f"{field.encode_name} is missing")
            return UNFIT
    return kind(**found)


def _choices(kind: Any) -> tuple[Any, ...]:
    """What a value may be, without bounds and without None."""
    if get_origin(kind) is Annotated:
        return _choices(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(choice for each in get_args(kind) for choice in _choices(each))
    return (kind,)


def _inside(place: str, key: str) -> str:
    key = key if len(key) < _LONGEST_NUMBER else f"{key[:_LONGEST_NUMBER]}…"
    return f"{place}.{key}" if place else key


def _integer(text: str) -> int | str:
    return int(text) if len(text) <= _LONGEST_NUMBER else f"{text[:_LONGEST_NUMBER]}…"


def _number(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else f"{text[:_LONGEST_NUMBER]}…"


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return str(error)
