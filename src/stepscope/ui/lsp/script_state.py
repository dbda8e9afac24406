"""What is known of a script and of open files, what of it may be shown for the text as it is
now, and the user's settings.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lsprotocol import types
from pygls.uris import from_fs_path

from stepscope.records.source_lines import FollowedLines, LineCost, LineCosts
from stepscope.ui.editor.edits import LineChange, follow, text_lines

if TYPE_CHECKING:
    from stepscope.ui.lsp.measured_run import MeasuredRun

# Costs belong to the program that was measured or estimated. Once any of its files is another
# program, they are stale: shown as what was, until an estimate or a measurement of the new one
# comes.

_MOST_FOLLOWED = 32  # texts, of all files of a script

Trust = Literal["measured", "estimated", "stale"]
TextOf = Callable[[Path], str | None]  # a file as it is now: in the editor, else on the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStep:
    """A training that is being measured, so far."""

    step: int
    step_ms: float | None
    message: str


@dataclass(slots=True, kw_only=True)
class ScriptState:
    """One script. Changed by the server's loop only."""

    script: Path
    measured: MeasuredRun | None = None
    estimate: LineCosts | None = None
    estimate_failed: str | None = None  # why the newest text has none
    error: str | None = None  # why the last profile gave nothing
    running_since: str | None = None  # ISO 8601
    live: LiveStep | None = None
    profile_on_save: bool | None = None  # None: as the settings say
    followed: dict[tuple[str, Path, str], FollowedLines] = field(default_factory=dict)

    def set_measured(self, measured: MeasuredRun) -> None:
        """A new measurement: what was estimated before it counts no more."""
        self.measured, self.estimate, self.estimate_failed, self.error = measured, None, None, None
        self.followed.clear()

    def set_estimate(self, costs: LineCosts | None, failed: str | None) -> None:
        self.estimate, self.estimate_failed = costs, failed
        self.followed.clear()

    def covers(self, file: Path) -> bool:
        """Return whether costs of this file's lines are known through this script."""
        costs = self.measured.costs if self.measured is not None else self.estimate
        return file == self.script or (costs is not None and str(file) in costs.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCosts:
    """Costs, and how far they can be trusted for the program as it is now."""

    costs: LineCosts
    trust: Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownLine:
    """What one line costs, at its place today (from 1)."""

    cost: LineCost
    line: int
    trust: Trust
    estimated: bool  # the figures were estimated, stale or not


def choose_costs(state: ScriptState, text_of: TextOf) -> ShownCosts | None:
    """Measured for this very program, else estimated for it, else what was measured before."""
    measured = state.measured.costs if state.measured is not None else None
    if measured is not None and is_same_program(measured, text_of):
        return ShownCosts(costs=measured, trust="measured")
    if state.estimate is not None and is_same_program(state.estimate, text_of):
        return ShownCosts(costs=state.estimate, trust="estimated")
    last = measured or state.estimate
    return ShownCosts(costs=last, trust="stale") if last is not None else None


def is_same_program(costs: LineCosts, text_of: TextOf) -> bool:
    """Return whether every file that was part of it still is the same program."""
    for file, before in costs.texts.items():
        now = text_of(Path(file))
        if now is None:
            return False
        if now != before and (program_key(now) is None or program_key(now) != program_key(before)):
            return False
    return True


def followed_lines(
    state: ScriptState, costs: LineCosts, file: Path, text: str
) -> FollowedLines | None:
    """Return where measured lines are in today's text; None for a file that was not part of it."""
    if str(file) not in costs.texts:
        return None
    key = (costs.kind, file, text)
    if key not in state.followed:
        if len(state.followed) >= _MOST_FOLLOWED:
            state.followed.clear()
        state.followed[key] = follow(costs, file, text)
    return state.followed[key]


def shown_lines(state: ScriptState, file: Path, text: str, text_of: TextOf) -> list[ShownLine]:
    """Return the lines of one file, in the order of its text."""
    shown = choose_costs(state, text_of)
    followed = followed_lines(state, shown.costs, file, text) if shown is not None else None
    if shown is None or followed is None:
        return []
    lines = [
        ShownLine(
            cost=one.cost,
            line=one.line,
            trust="stale" if one.state == "stale" else shown.trust,
            estimated=shown.costs.kind == "estimated",
        )
        for one in followed.lines
        if one.line is not None
    ]
    return sorted(lines, key=lambda one: one.line)


# Whether two texts are the same program: comments, blank lines and layout do not count.


@lru_cache(maxsize=256)
def program_key(text: str) -> str | None:
    """Return a key that is equal for texts that run alike; None for a text that is not Python."""
    tree = syntax_tree(text)
    return None if tree is None else hashlib.sha256(ast.dump(tree).encode()).hexdigest()


@lru_cache(maxsize=64)
def syntax_tree(text: str) -> ast.Module | None:
    """Parse a text. The tree is shared: do not change it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about the user's own source
            return ast.parse(text.removeprefix("\ufeff"))  # a byte order mark
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def qualified_name(text: str, line: int) -> str:
    """Return the function around a line (from 1), with the classes and functions around it:
    Net.forward; empty at the top level, and for a text that is not Python."""
    around = [scope for scope in _scopes(text) if scope[0] <= line <= scope[1]]
    if not any(scope[3] for scope in around):
        return ""
    return ".".join(name for _, _, name, _ in around)


@lru_cache(maxsize=64)
def _scopes(text: str) -> tuple[tuple[int, int, str, bool], ...]:
    """First and last line, name, and whether it is a function; outer ones first."""
    tree = syntax_tree(text)
    if tree is None:
        return ()
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    scopes = [
        (node.lineno, node.end_lineno or node.lineno, node.name, isinstance(node, functions))
        for node in ast.walk(tree)
        if isinstance(node, functions | ast.ClassDef)
    ]
    return tuple(sorted(scopes, key=lambda scope: (scope[0], -scope[1])))


# A file as the editor has it now.


@dataclass(frozen=True)
class OpenFile:
    """`units` counts a text's length as the editor does."""

    path: Path
    uri: str
    text: str
    version: int | None
    units: Callable[[str], int]

    @cached_property
    def lines(self) -> list[str]:
        return text_lines(self.text)

    def width(self, line: int) -> int:
        """Return the width of a line (from 0), without its end."""
        return self.units(self._line(line)) if 0 <= line < len(self.lines) else 0

    def line_range(self, line: int) -> types.Range:
        """Return the range from a line's first word to its end."""
        text = self._line(line) if 0 <= line < len(self.lines) else ""
        indent = len(text) - len(text.lstrip())
        start = types.Position(line, self.units(text[:indent]))
        return types.Range(start, types.Position(line, self.units(text)))

    def _line(self, line: int) -> str:
        return self.lines[line].rstrip("\n")


# Changes of files as edits that an editor applies, and can undo.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceEdits:
    """`units` counts a text's length as the editor does; `versioned` if it takes versions."""

    open_files: Mapping[Path, OpenFile]
    text_of: TextOf
    units: Callable[[str], int]
    versioned: bool

    def of(self, changes: Mapping[str, Sequence[LineChange]]) -> types.WorkspaceEdit:
        """Whole lines of several files, by path."""
        edits: dict[Path, list[types.TextEdit]] = {}
        for name, lines in changes.items():
            text = text_lines(self.text_of(Path(name)) or "")
            edits[Path(name)] = [self._lines(text, change) for change in lines]
        return self.of_edits(edits)

    def of_edits(self, edits: Mapping[Path, Sequence[types.TextEdit]]) -> types.WorkspaceEdit:
        """Make edits; with versions an editor refuses those of a text that has changed
        meanwhile.
        """
        if not self.versioned:
            return types.WorkspaceEdit(
                changes={self._uri(path): list(some) for path, some in edits.items()}
            )
        return types.WorkspaceEdit(
            document_changes=[
                types.TextDocumentEdit(
                    types.OptionalVersionedTextDocumentIdentifier(
                        uri=self._uri(path), version=self._version(path)
                    ),
                    list(some),
                )
                for path, some in edits.items()
            ]
        )

    def _uri(self, path: Path) -> str:
        known = self.open_files.get(path)
        return known.uri if known is not None else from_fs_path(str(path)) or str(path)

    def _version(self, path: Path) -> int | None:
        known = self.open_files.get(path)
        return known.version if known is not None else None

    def _lines(self, text: Sequence[str], change: LineChange) -> types.TextEdit:
        """The last line of a text may lack its end."""
        start, end = types.Position(change.start, 0), types.Position(change.end, 0)
        if change.end == len(text) and text and not text[-1].endswith("\n"):
            end = types.Position(len(text) - 1, self.units(text[-1]))
            if change.start == len(text):
                start = end
        return types.TextEdit(range=types.Range(start, end), new_text="".join(change.lines))


# What a user may set in the editor, section `stepscope`.

LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EditorSettings:
    """Names in the editor: python, arguments, profileOnSave, limitSeconds, hints, estimate."""

    python: str = sys.executable  # that runs the scripts
    arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by glob of the script
    profile_on_save: bool = False
    limit_s: float = LIMIT_S  # after which a profile is ended
    hints: bool = True
    estimate: bool = True  # after an edit, of scripts that were measured once

    def updated(self, values: Any) -> tuple[EditorSettings, tuple[str, ...]]:
        """Take the editor's values, and say what is wrong with those that are left out."""
        if not isinstance(values, dict):
            return self, ()
        section = values.get("stepscope")
        given = section if isinstance(section, dict) else values
        settings, wrong = self, []
        for name, (attribute, read, expected) in _FIELDS.items():
            value = given.get(name)
            if value is None or value == "":
                continue
            try:
                settings = replace(settings, **{attribute: read(value)})
            except (TypeError, ValueError):
                wrong.append(f"stepscope.{name} is {value!r}: expected {expected}")
        return settings, tuple(wrong)

    def arguments_of(self, script: Path, roots: Iterable[Path]) -> tuple[str, ...]:
        """Return those of the first glob that matches its name or path, from a root or absolute."""
        names = [script.name, script.as_posix()]
        inside = [root for root in roots if script.is_relative_to(root)]
        names += [script.relative_to(root).as_posix() for root in inside]
        for pattern, arguments in self.arguments.items():
            if any(fnmatch(name, pattern) for name in names):
                return arguments
        return ()


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return str(Path(value).expanduser()) if value.startswith("~") else value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 86_400:
        raise ValueError
    return float(value)


def _arguments(value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise TypeError
    for words in value.values():
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise TypeError
    return {str(pattern): tuple(words) for pattern, words in value.items()}


_FIELDS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "python": ("python", _text, "the path of a Python"),
    "arguments": ("arguments", _arguments, 'lists by script, such as {"train.py": ["--lr", "1"]}'),
    "profileOnSave": ("profile_on_save", _bool, "true or false"),
    "limitSeconds": ("limit_s", _seconds, "seconds, from 1 to 86400"),
    "hints": ("hints", _bool, "true or false"),
    "estimate": ("estimate", _bool, "true or false"),
}
