"""The edit that a person would make instead of an injected remedy."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stepscope.fix.python_source import Edit, PythonSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from stepscope.records.script_facts import Frame, ScriptFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Edits where the place was found; otherwise a sentence that says what to add and where."""

    edits: tuple[Edit, ...] = ()
    by_hand: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)  # to set where the command is started

    def __add__(self, other: Proposal) -> Proposal:
        return Proposal(
            edits=(*self.edits, *(edit for edit in other.edits if edit not in self.edits)),
            by_hand=tuple(dict.fromkeys((*self.by_hand, *other.by_hand))),
            variables=self.variables | other.variables,
        )


class Script:
    """The user's training: what it is made of, and its source files."""

    def __init__(self, facts: ScriptFacts, read: Callable[[str], bytes | None]) -> None:
        self.facts = facts
        self._read = read
        self._sources: dict[str, PythonSource | None] = {}

    def source(self, file: str) -> PythonSource | None:
        """None if it cannot be read or is not Python."""
        if file not in self._sources:
            text = self._read(file)
            self._sources[file] = PythonSource.parse(file, text) if text is not None else None
        return self._sources[file]

    def source_of(self, frames: Iterable[Frame]) -> tuple[PythonSource, Frame] | None:
        """The innermost frame whose source can be read."""
        for frame in frames:
            source = self.source(frame.file)
            if source is not None:
                return source, frame
        return None


def edited(edits: Iterable[Edit], read: Callable[[str], bytes | None]) -> dict[str, bytes]:
    """Each file with its edits made; edits that would overlap raise ValueError."""
    by_file: dict[str, list[Edit]] = defaultdict(list)
    for edit in edits:
        by_file[edit.file].append(edit)
    changed = {}
    for file, wanted in by_file.items():
        text = read(file)
        if text is None:
            raise ValueError(f"{file} can no longer be read")
        changed[file] = _make(text, with_indentation(file, text, wanted))
    return changed


def with_indentation(file: str, text: bytes, edits: Sequence[Edit]) -> list[Edit]:
    """The edits of a file, and those that indent what stands below headers."""
    source = PythonSource.parse(file, text)
    headers = [edit for edit in edits if edit.wraps_to]
    headers.sort(key=lambda edit: (-edit.wraps_to, edit.start))  # the outer ones first
    if source is None or not headers:
        return list(edits)
    _check_nesting(headers)
    return list(_indented(source, headers, edits))


def _check_nesting(headers: list[Edit]) -> None:
    for one in headers:
        for other in headers:
            if one.start < other.start < one.wraps_to < other.wraps_to:
                raise ValueError(f"two changes edit the same place in {one.file}")


def _indented(source: PythonSource, headers: list[Edit], edits: Sequence[Edit]) -> Iterator[Edit]:
    """Headers with the lines below them indented, and what is inserted there too."""
    units: dict[Edit, bytes] = {}
    for header in headers:
        places, units[header] = source.indentable(header)
        for place in places:
            yield Edit(source.file, place, place, units[header])
    for edit in edits:
        if edit.wraps_to:
            continue
        around = [header for header in headers if header.start < edit.start < header.wraps_to]
        levels = b"".join(units[header] for header in around)
        yield replace(edit, text=_deeper(edit.text, levels)) if _is_lines(edit) else edit
    for number, header in enumerate(headers):
        around = [
            other for other in headers[:number] if other.start <= header.start < other.wraps_to
        ]
        levels = b"".join(units[other] for other in around)
        yield replace(header, text=_deeper(header.text, levels))


def _is_lines(edit: Edit) -> bool:
    return edit.start == edit.end and edit.text.endswith(b"\n")


def _deeper(lines: bytes, indent: bytes) -> bytes:
    return b"".join(
        indent + line if line.strip() else line for line in lines.splitlines(keepends=True)
    )


def _make(text: bytes, edits: list[Edit]) -> bytes:
    """At one place: inserted lines first, as they were asked for, then headers, then the rest."""

    def order(edit: Edit) -> tuple[int, int, bool, int]:
        wrapped = -edit.wraps_to if edit.wraps_to else -sys.maxsize
        return edit.start, edit.end, not _is_lines(edit), wrapped

    parts: list[bytes] = []
    done = 0
    for edit in sorted(edits, key=order):  # stable
        if edit.start < done:
            raise ValueError(f"two changes edit the same place in {edit.file}")
        parts += [text[done : edit.start], edit.text]
        done = edit.end
    return b"".join([*parts, text[done:]])
