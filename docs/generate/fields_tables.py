"""Make the tables of docs/reference/json.md from docs/reference/fields.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from page_text import code, table

if TYPE_CHECKING:
    from collections.abc import Iterator

FIELDS = Path(__file__).parent.parent / "reference/fields.toml"
FILES = "Files of a run folder"  # a section with a list of its own before it
EVERYWHERE = "*"  # stands where a table's names mean the same wherever they appear

# The end of a name says its unit; the first that fits counts.
_UNITS = (
    (r"ns_per_byte", "ns"),
    (r"bytes_s", "bytes/s"),
    (r"gb_s", "GB/s"),
    (r"\w+_per_s", "1/s"),
    (r"ns", "ns"),
    (r"us", "µs"),
    (r"ms", "ms"),
    (r"s|seconds", "s"),
    (r"unix", "s"),
    (r"bytes", "bytes"),
    (r"flops", "FLOPs"),
    (r"share", "share"),
    (r"ppm", "ppm"),
    (r"count", "count"),
    (r"factor|speedup", "times"),
)


@dataclass(frozen=True)
class Field:
    """One line of a table: names that share a meaning."""

    names: tuple[str, ...]
    meaning: str
    by: str  # module:qualname, without `stepscope.`
    unit: str


@dataclass(frozen=True)
class FieldTable:
    section: str
    title: str
    at: tuple[str, ...]
    by: str  # computes the fields that name no function of their own
    about: str
    fields: tuple[Field, ...]

    def paths(self) -> Iterator[tuple[str, str]]:
        """Yield (verb or file, path) of every field, in all places of this table."""
        for place in self.at:
            if place == EVERYWHERE:
                continue
            verb, _, prefix = place.rpartition(":")
            for field in self.fields:
                for name in field.names:
                    yield verb or "explain", f"{prefix}.{name}" if prefix else name


def read_tables() -> list[FieldTable]:
    content = tomllib.loads(FIELDS.read_text())
    return [_read_table(entry) for entry in content["table"]]


def fields_tables(wanted: str) -> str:
    """Return the tables of one section, or those of all other sections for `verbs`."""
    tables = read_tables()
    if wanted != "verbs":
        return "\n\n".join(_show(fields) for fields in tables if fields.section == wanted)
    parts, section = [], ""
    for fields in tables:
        if fields.section == FILES:
            continue
        if fields.section != section:
            section = fields.section
            parts.append(f"## {section}")
        parts.append(_show(fields))
    return "\n\n".join(parts)


def _read_table(entry: dict) -> FieldTable:
    at = entry["at"]
    return FieldTable(
        section=entry["section"],
        title=entry["title"],
        at=(at,) if isinstance(at, str) else tuple(at),
        by=entry["by"],
        about=entry.get("about", ""),
        fields=tuple(_read_field(*item, entry["by"]) for item in entry["fields"].items()),
    )


def _read_field(names: str, value: str | dict, by: str) -> Field:
    entry = {"is": value} if isinstance(value, str) else value
    parts = tuple(names.split(", "))
    return Field(parts, entry["is"], entry.get("by", by), entry.get("unit") or _unit(parts))


def _unit(names: tuple[str, ...]) -> str:
    units = dict.fromkeys(unit for name in names if (unit := _unit_of(name)))
    return ", ".join(units)


def _unit_of(name: str) -> str:
    last = re.sub(r"\[\]|\.\*", "", name).rpartition(".")[2]
    return next(
        (unit for end, unit in _UNITS if re.search(rf"(?:^|_)(?:{end})$", last)),
        "",
    )


def _show(fields: FieldTable) -> str:
    parts = [f"### {fields.title}"] if fields.title else []
    places = [place.partition(":")[2] or "" if ":" in place else place for place in fields.at]
    named = list(dict.fromkeys(place for place in places if place not in ("", EVERYWHERE)))
    about = [f"At {' and '.join(map(code, named))}."] if named else []
    about += [fields.about] if fields.about else []
    about.append(f"Function: {code(fields.by)}.")
    parts.append(" ".join(about))
    parts.append(_table(fields))
    return "\n\n".join(parts)


def _table(fields: FieldTable) -> str:
    """Leave a column out where it would say nothing in any row."""
    rows = [
        (
            _names(row.names),
            row.meaning,
            "" if row.unit == _unit(row.names) else row.unit,
            "" if row.by == fields.by else code(row.by),
        )
        for row in fields.fields
    ]
    columns = list(zip(("field", "meaning", "unit", "function"), *rows, strict=True))
    head, *lines = zip(*(column for column in columns if any(column[1:])), strict=True)
    return table(head, lines)


def _names(names: tuple[str, ...]) -> str:
    """Return names in code; what a name shares with the one before is left out."""
    shown, before = [], ""
    for name in names:
        container = name.rpartition(".")[0]
        short = container and container == before
        shown.append(code(name.removeprefix(container) if short else name))
        before = container
    return ", ".join(shown)
