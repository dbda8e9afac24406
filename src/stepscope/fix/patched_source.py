"""The user's source with the edits of several remedies made, one remedy after the other.

Each remedy sees the source as the ones before it left it, and the places that its facts name are
moved along: a second `with` block then goes around or inside the first one, and what is inserted
stands at the right depth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from stepscope.fix.proposal import Proposal, Script, edited, with_indentation
from stepscope.fix.python_source import Edit, NoPlaceError, PythonSource, SourceLines
from stepscope.records.script_facts import Frame, ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.named_changes import ChosenChange


@dataclass(frozen=True, slots=True)
class PatchedSource:
    """`before` and `after` hold the files that change; the rest is what a person has to do."""

    before: dict[str, bytes] = field(default_factory=dict)
    after: dict[str, bytes] = field(default_factory=dict)
    by_hand: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


def patch_source(
    facts: ScriptFacts, chosen: Sequence[ChosenChange], read: Callable[[str], bytes | None]
) -> PatchedSource:
    """Make every edit that can be made; `read` gives None for files that must not be edited."""
    patching = _Patching(facts, read)
    for one in chosen:
        patching.add(one)
    return patching.result()


class _Patching:
    def __init__(self, facts: ScriptFacts, read: Callable[[str], bytes | None]) -> None:
        self._original = Script(facts, read)
        self._facts, self._read_original = facts, read
        self._after: dict[str, bytes] = {}
        self._by_hand: list[str] = []
        self._variables: dict[str, str] = {}

    def add(self, chosen: ChosenChange) -> None:
        proposal = _proposal(Script(self._facts, self._read), chosen)
        if proposal is None or not self._make(proposal.edits):
            self._by_hand.append(_in_words(chosen, self._original.facts))
            return
        self._variables |= proposal.variables
        if proposal.by_hand:  # lines are those of the user's own file
            first = _proposal(self._original, chosen)
            words = first.by_hand if first is not None and first.by_hand else proposal.by_hand
            self._by_hand += words

    def _make(self, edits: Sequence[Edit]) -> bool:
        try:
            changed = edited(edits, self._read)
        except ValueError:
            return False
        if any(PythonSource.parse(file, text) is None for file, text in changed.items()):
            return False
        self._facts = _moved(self._facts, edits, self._read)
        self._after |= changed
        return True

    def _read(self, file: str) -> bytes | None:
        return self._after[file] if file in self._after else self._read_original(file)

    def result(self) -> PatchedSource:
        before = {file: self._read_original(file) or b"" for file in self._after}
        changed = [file for file in self._after if self._after[file] != before[file]]
        return PatchedSource(
            before={file: before[file] for file in changed},
            after={file: self._after[file] for file in changed},
            by_hand=tuple(dict.fromkeys(self._by_hand)),
            variables=self._variables,
        )


def _proposal(script: Script, chosen: ChosenChange) -> Proposal | None:
    try:
        return chosen.fix.patch(script, chosen.value)
    except NoPlaceError:
        return None


def _in_words(chosen: ChosenChange, facts: ScriptFacts) -> str:
    """For an edit whose place is known but that cannot be made there."""
    value = f" ({chosen})" if chosen.value else ""
    where = f"; the training step is at {facts.backward[0].words}" if facts.backward else ""
    return f"{chosen.change.action}{value}{where}"


def _moved(
    facts: ScriptFacts, edits: Sequence[Edit], read: Callable[[str], bytes | None]
) -> ScriptFacts:
    """The same facts, with the lines that their frames have after the edits."""
    by_file: dict[str, list[Edit]] = defaultdict(list)
    for edit in edits:
        by_file[edit.file].append(edit)
    moves = {file: _Move(file, read(file) or b"", made) for file, made in by_file.items()}

    def move(value: Any) -> Any:
        if isinstance(value, Frame):
            return moves[value.file].frame(value) if value.file in moves else value
        if is_dataclass(value) and not isinstance(value, type):
            return replace(
                value, **{one.name: move(getattr(value, one.name)) for one in fields(value)}
            )
        return tuple(map(move, value)) if isinstance(value, tuple) else value

    moved: ScriptFacts = move(facts)
    return moved


class _Move:
    """Where places of one file are after edits of it."""

    def __init__(self, file: str, text: bytes, edits: Sequence[Edit]) -> None:
        self._before = SourceLines(text)
        made = with_indentation(file, text, edits)
        self._edits = sorted(made, key=lambda edit: edit.start)
        self._after = SourceLines(next(iter(edited(edits, lambda _file: text).values())))

    def frame(self, frame: Frame) -> Frame:
        indent = len(self._before.indent(frame.line).encode())
        line = self._after.line_of(self._place(self._before.start_of(frame.line) + indent))
        return replace(frame, line=line, ends=self._ends(frame.ends))

    def _ends(self, ends: tuple[int, int] | None) -> tuple[int, int] | None:
        """By the last byte of the code: what is inserted after it does not belong to it."""
        if ends is None:
            return None
        last = self._place(self._before.start_of(ends[0]) + ends[1] - 1)
        line = self._after.line_of(last)
        return line, last - self._after.start_of(line) + 1

    def _place(self, place: int) -> int:
        """What is inserted at a place comes before what stood there."""
        moved = place
        for edit in self._edits:
            if edit.end <= place:
                moved += len(edit.text) - (edit.end - edit.start)
            elif edit.start <= place:
                return moved - (place - edit.start)
        return moved
