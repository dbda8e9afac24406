"""The edit that a person would make instead of an injected remedy."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stepscope.fix.python_source import Edit, PythonSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
            raise ValueError(f"{file} cannot be read any more")
        changed[file] = _make(text, wanted)
    return changed


def _make(text: bytes, edits: list[Edit]) -> bytes:
    """Insertions at one place follow each other in the order they were asked for; headers stand
    inside those that cover more."""
    headers = [edit for edit in edits if edit.until]
    _check_nesting(headers)
    replacements = [edit for edit in edits if edit.end > edit.start]
    places = {edit.start for edit in edits} | {place for edit in headers for place in edit.moves}
    parts: list[bytes] = []
    done = 0
    for place in sorted(places):
        if place < done:
            raise ValueError(f"two remedies change the same place in {edits[0].file}")
        here = [edit for edit in edits if edit.start == place and edit.end == place]
        parts += [text[done:place], _inserted(place, here, headers)]
        replaced = [edit for edit in replacements if edit.start == place]
        if len(replaced) > 1:
            raise ValueError(f"two remedies change the same place in {edits[0].file}")
        parts += [edit.text for edit in replaced]
        done = replaced[0].end if replaced else place
    return b"".join([*parts, text[done:]])


def _inserted(place: int, here: list[Edit], headers: list[Edit]) -> bytes:
    """New lines, then headers, then what moves the old line to the right, then new expressions."""
    around = b"".join(edit.level for edit in headers if edit.start < place < edit.until)
    parts: list[bytes] = []
    for edit in here:
        if not edit.until and edit.text.endswith(b"\n"):
            lines = edit.text.splitlines(keepends=True)
            parts += [around + line if line.strip() else line for line in lines]
    for edit in sorted(here, key=lambda edit: -edit.until):
        if edit.until:
            parts.append(around + edit.text)
            around += edit.level
    parts += [edit.level for edit in headers if place in edit.moves]
    parts += [edit.text for edit in here if not edit.until and not edit.text.endswith(b"\n")]
    return b"".join(parts)


def _check_nesting(headers: list[Edit]) -> None:
    for one in headers:
        for other in headers:
            if one.start < other.start < one.until < other.until:
                raise ValueError(f"two remedies change the same place in {one.file}")
