"""Lists of step times from a text file, CSV, JSON or JSON lines, as milliseconds.

A column's name gives the unit if it ends in _ns, _us, _ms or _s, or is a unit itself; else the
caller does.
"""

from __future__ import annotations

import csv
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.trace.decode import NotJsonError, brief, decode
from stepscope.trace.regular_files import read_start, read_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

UNITS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
ENDINGS = (".txt", ".csv", ".tsv", ".jsonl", ".ndjson")
_LARGEST_JSON = 8 << 20  # a larger JSON file is a trace, unless it begins with a number
_LONGEST_MS = 1e15
_LONGEST_CELL = 64
_LARGEST, _MOST_LINES = 64 << 20, 4_000_000
_BOM = b"\xef\xbb\xbf"
_BARE_NUMBERS = re.compile(rb"\s*\[\s*[-\d]")
_UNIT_OF_NAME = re.compile(r"(?:^|_)(ns|us|ms|s)$", re.IGNORECASE)
_NUMBER = re.compile(r"([-+.\w]+?)\s*(ns|us|µs|ms|s)?", re.IGNORECASE)


def is_step_list(path: Path) -> bool:
    """By its name; a .json file may be a trace as well, so its content decides."""
    if path.name.endswith(ENDINGS):
        return True
    if not path.name.endswith(".json"):
        return False
    try:
        text = read_start(path, _LARGEST_JSON + 1)
        if _BARE_NUMBERS.match(text[:256].removeprefix(_BOM)):
            return True
        return len(text) <= _LARGEST_JSON and _is_list(decode(text, Any))
    except (UnreadableInputError, NotJsonError):
        return False


def read_step_list(path: Path, unit: str = "ms", column: str | None = None) -> Floats:
    """In the order of the file; raises UnreadableInputError for anything but step times."""
    text = _decode_file(path)
    if path.name.endswith(".json"):
        rows = _json_rows(path, _decoded(path, text))
    elif path.name.endswith((".jsonl", ".ndjson")):
        rows = _json_lines(path, text)
    else:
        rows = _text_rows(text, path.name.endswith((".csv", ".tsv")))
    values = _values(path, rows, unit, column)
    if not len(values):
        raise UnreadableInputError(f"{path} holds no step times")
    return values


def _decode_file(path: Path) -> str:
    content = read_whole(path, _LARGEST)
    if content.count(b"\n") > _MOST_LINES:
        raise UnreadableInputError(f"{path} has more than {_MOST_LINES:,} lines: give fewer steps")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableInputError(f"{path} is not text, but a step list is") from None


def _decoded(path: Path, text: str) -> Any:
    try:
        return decode(text.encode(), Any)
    except NotJsonError as error:
        raise UnreadableInputError(f"{path} is incomplete or not JSON: {error}") from None


def _is_list(content: Any) -> bool:
    if isinstance(content, dict):
        return "traceEvents" not in content and any(
            isinstance(value, list) and value and _is_number(value[0]) for value in content.values()
        )
    if not isinstance(content, list) or not content:
        return False
    first = content[0]
    return _is_number(first) or (isinstance(first, dict) and "ph" not in first)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _json_rows(path: Path, content: Any) -> list[tuple[int, Any]]:
    if isinstance(content, dict):
        lists = {
            name: value
            for name, value in content.items()
            if isinstance(value, list) and value and _is_number(value[0])
        }
        if not lists:
            raise UnreadableInputError(f"{path} holds no list of numbers")
        chosen = _choose(path, list(lists), None)
        return [(place, {chosen: value}) for place, value in enumerate(lists[chosen], 1)]
    if not isinstance(content, list):
        raise UnreadableInputError(f"{path} holds {brief(content)}, but a list is needed")
    return list(enumerate(content, 1))


def _json_lines(path: Path, text: str) -> list[tuple[int, Any]]:
    """A last line that was cut short is left out."""
    rows = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append((number, decode(line.encode(), Any)))
        except NotJsonError as error:
            if number == len(lines):
                break
            raise UnreadableInputError(f"{path}, line {number}: {error}") from None
    return rows


def _text_rows(text: str, is_csv: bool) -> list[tuple[int, Any]]:
    lines = [
        (number, line.strip())
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not is_csv:
        return [(number, word) for number, line in lines for word in _words(line)]
    if not lines:
        return []
    delimiter = max(",;\t", key=lines[0][1].count)
    cells = [(number, _cells(line, delimiter)) for number, line in lines]
    head = cells[0][1]
    if any(_as_number(cell) is None for cell in head):
        return [(number, dict(zip(head, row, strict=False))) for number, row in cells[1:]]
    if len(head) == 1:
        return [(number, row[0]) for number, row in cells]
    names = [str(place) for place in range(1, len(head) + 1)]
    return [(number, dict(zip(names, row, strict=False))) for number, row in cells]


def _cells(line: str, delimiter: str) -> list[str]:
    """A line that is no CSV is one cell, which is no step time."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))]
    except csv.Error:
        return [line]


def _words(line: str) -> list[str]:
    """Numbers between spaces or commas; a unit stays with its number."""
    return re.findall(r"[^\s,;]+(?:\s+(?:ns|us|µs|ms|s)\b)?", line)


def _values(path: Path, rows: Sequence[tuple[int, Any]], unit: str, column: str | None) -> Floats:
    names = list(dict.fromkeys(name for _, row in rows if isinstance(row, dict) for name in row))
    if names:
        timed = [name for name in names if _UNIT_OF_NAME.search(name)]
        chosen = _choose(path, names if column or not timed else timed, column)
        named = _UNIT_OF_NAME.search(chosen)
        unit = named[1].lower() if named else unit
        rows = [
            (number, row[chosen] if isinstance(row, dict) else row)
            for number, row in rows
            if not isinstance(row, dict) or chosen in row
        ]
    elif column is not None:
        raise UsageError(f"--column {column}: {path} has no columns")
    plain = _plain_numbers([cell for _, cell in rows])
    if plain is not None:
        return plain * UNITS[unit]
    out = np.empty(len(rows))
    for place, (number, cell) in enumerate(rows):
        number_and_unit = _as_number(cell)
        if number_and_unit is None or not 0 < number_and_unit[0] <= _LONGEST_MS:
            raise UnreadableInputError(f"{path}, line {number}: {brief(cell)} is not a step time")
        out[place] = number_and_unit[0] * UNITS[number_and_unit[1] or unit]
    return out


def _plain_numbers(cells: Sequence[Any]) -> Floats | None:
    """All at once, which is fast; None unless every cell is a step time without a unit."""
    kinds = set(map(type, cells))
    if not kinds or (not kinds <= {int, float} and kinds != {str}):
        return None
    # numpy would give every cell the size of the longest
    if kinds == {str} and max(map(len, cells)) > _LONGEST_CELL:
        return None
    try:
        out = np.array(cells, np.float64)
    except (ValueError, OverflowError):
        return None
    return out if ((out > 0) & (out <= _LONGEST_MS)).all() else None


def _choose(path: Path, names: Sequence[str], column: str | None) -> str:
    if column is not None:
        if column in names:
            return column
        raise UsageError(f"{path} has no column {column}. It has {', '.join(names)}")
    if len(names) == 1:
        return names[0]
    steps = [name for name in names if name.lower().startswith("step")]
    timed = [name for name in steps if _UNIT_OF_NAME.search(name)] or steps
    if len(timed) == 1:
        return timed[0]
    raise UsageError(
        f"{path} has several columns. Name the one with step times: --column {'|'.join(names)}"
    )


def _as_number(cell: Any) -> tuple[float, str | None] | None:
    try:
        if _is_number(cell):
            return float(cell), None
        short = isinstance(cell, str) and len(cell) <= _LONGEST_CELL
        match = _NUMBER.fullmatch(cell.strip()) if short else None
        return (float(match[1]), _unit(match[2])) if match else None
    except (ValueError, OverflowError):  # a word, or an integer of hundreds of digits
        return None


def _unit(text: str | None) -> str | None:
    return (text or "").lower().replace("µ", "u") or None
