"""The edit a person would make instead of an injected remedy: a keyword in a constructor
call, a switch at the top, a statement before training, an environment variable.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from stepscope.fix.python_source import Edit, PythonSource

if TYPE_CHECKING:
    from stepscope.records.script_facts import Built, Frame, RootCall, ScriptFacts


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

    def statement(self, frame: Frame) -> tuple[PythonSource, ast.stmt] | None:
        """The statement that a frame ran, with its file."""
        source = self.source(frame.file)
        found = source.statement_at(frame.line, frame.ends) if source is not None else None
        return (source, found) if source is not None and found is not None else None

    def statements(self, frames: Iterable[Frame]) -> Iterator[tuple[Frame, PythonSource, ast.stmt]]:
        """Those of several frames, where they can be read."""
        for frame in frames:
            found = self.statement(frame)
            if found is not None:
                yield frame, *found

    def building_call(self, built: Built) -> tuple[PythonSource, ast.Call] | None:
        """Where the user's own code builds an object."""
        if not built.direct or not built.frames:
            return None
        frame = built.frames[0]
        source = self.source(frame.file)
        call = source.call_at(frame.line, built.type, frame.ends) if source is not None else None
        return (source, call) if source is not None and call is not None else None

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


# Keywords added to constructor calls in the user's source, as many remedies need.


def set_arguments(
    script: Script,
    kind: str,
    arguments: Mapping[str, str],
    *,
    positions: Mapping[str, int] | None = None,
    where: Callable[[Built], bool] | None = None,
    in_libraries: Mapping[str, str] | None = None,
) -> Proposal:
    """Give arguments (name -> source text) to every object of a kind where it is built.

    `positions` says where an argument stands if it is given without its name; `where` chooses among
    what was built. `in_libraries` (package -> sentence) says what to do if that package builds
    them, not the user's own code.
    """
    wanted = [
        built
        for built in script.facts.of_kind(kind)
        if built.trains and (where is None or where(built))
    ]
    proposal = Proposal()
    for built in _nearest_to_user(wanted, in_libraries or {}):
        if in_libraries and built.library in in_libraries:
            proposal += Proposal(by_hand=(in_libraries[built.library],))
            continue
        proposal += _set_where_built(script, built, arguments, positions or {})
    return proposal


def _nearest_to_user(wanted: list[Built], known: Collection[str]) -> list[Built]:
    """Libraries build objects again from those they were given: what the user's own code built
    comes first, then what a library builds that has an option for it."""
    direct = [built for built in wanted if built.direct]
    return direct or [built for built in wanted if built.library in known] or wanted


def _set_where_built(
    script: Script, built: Built, arguments: Mapping[str, str], positions: Mapping[str, int]
) -> Proposal:
    words = ", ".join(f"{name}={value}" for name, value in arguments.items())
    found = script.building_call(built)
    edits = found[0].set_keywords(found[1], arguments, positions) if found is not None else None
    if edits is not None:
        return Proposal(edits=edits)
    where = f" (it is built at {built.frames[0].words})" if built.frames else ""
    return Proposal(by_hand=(f"give {built.type} {words}{where}",))


# Switches of torch that are set once, by a line at the top of the script.


def set_switches(
    script: Script, switches: Mapping[str, str], *, others: Mapping[str, str] | None = None
) -> Proposal:
    """Set each (a function of one argument, or an attribute, of torch) to a value.

    Where the script sets it already, its value is replaced; for `others`, only there.
    """
    found = script.source_of(script.facts.forward[::-1])
    if found is None:
        lines = [_line(switch, value) for switch, value in switches.items()]
        return Proposal(by_hand=(f"before training: {'; '.join(lines)}",))
    source, _ = found
    edits: list[Edit] = []
    missing: list[str] = []
    for switch, value in switches.items():
        places = list(_values(source, switch))
        edits += [source.replace(place, value) for place in places]
        if not places:
            missing.append(_line(switch, value))
    for switch, value in (others or {}).items():
        edits += [source.replace(place, value) for place in _values(source, switch)]
    if missing:
        edits += [*source.ensure_import("torch"), source.insert_after_imports(*missing)]
    return Proposal(edits=tuple(edits))


def _line(switch: str, value: str) -> str:
    is_function = switch.endswith("()")
    return f"{switch[:-2]}({value})" if is_function else f"{switch} = {value}"


def _values(source: PythonSource, switch: str) -> Iterator[ast.expr]:
    """The values that the file sets it to."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and f"{ast.unparse(node.func)}()" == switch and node.args:
            yield node.args[0]
        if isinstance(node, ast.Assign) and switch in map(ast.unparse, node.targets):
            yield node.value


# Where in the source a model is complete and training has not begun: the place for a statement such
# as `model.compile()`.

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class RootPlace:
    """A statement, and what the model is called there."""

    source: PythonSource
    name: str
    statement: ast.stmt
    is_after: bool  # the new lines follow the statement

    def insert(self, *lines: str) -> Edit:
        add = self.source.insert_after if self.is_after else self.source.insert_before
        return add(self.statement, *lines)


def add_before_training(
    script: Script, lines: Callable[[str, RootCall], tuple[str, ...]], *, only: str | None = None
) -> Proposal:
    """`lines(name, call)` are the statements for a model of this name; `only` names its type."""
    proposal = Proposal()
    for call in script.facts.root_calls:
        if only is not None and call.type != only:
            continue
        place = place_before_training(script, call)
        if place is None:
            proposal += Proposal(by_hand=(_by_hand(call, lines("model", call)),))
        else:
            proposal += Proposal(edits=(place.insert(*lines(place.name, call)),))
    return proposal


def import_where_edited(script: Script, proposal: Proposal, *modules: str) -> Proposal:
    """Also import these in the files that the proposal changes."""
    imports = [
        edit
        for file in dict.fromkeys(edit.file for edit in proposal.edits)
        for module in modules
        for source in [script.source(file)]
        if source is not None
        for edit in source.ensure_import(module)
    ]
    return Proposal(edits=tuple(imports)) + proposal


def submodule(name: str, path: str) -> str:
    """Source text of a module inside another."""
    if not path:
        return name
    is_attribute = all(part.isidentifier() for part in path.split("."))
    return f"{name}.{path}" if is_attribute else f'{name}.get_submodule("{path}")'


def _by_hand(call: RootCall, lines: tuple[str, ...]) -> str:
    where = f" ({call.type} is called at {call.frames[0].words})" if call.frames else ""
    return f"once, before training{where}: {'; '.join(line.strip() for line in lines)}"


def place_before_training(script: Script, call: RootCall) -> RootPlace | None:
    """Before the outermost loop that has the model, else after the statement that sets it."""
    repeated = False
    callers = (*call.frames[1:], None)
    for frame, name, caller in reversed(list(zip(call.frames, call.names, callers, strict=True))):
        found = script.statement(frame)
        if found is None:
            continue
        source, statement = found
        loops = list(_loops_around(source, statement))
        by_library = caller is not None and not _calls(script, caller, frame)
        if name and not repeated:
            having = _loops_with(name, loops)
            if having or not (loops or by_library):
                first = having[-1] if having else statement
                return RootPlace(source, name, first, False) if source.starts_line(first) else None
        if name:
            setting = _only_setting(source, statement, name)
            if setting is not None:
                return RootPlace(source, name, setting, True)
        repeated = repeated or bool(loops) or by_library
    return None


def _calls(script: Script, caller: Frame, called: Frame) -> bool:
    """Whether the statement of one frame calls the other's function itself. If not, a library does,
    such as a trainer its hooks: perhaps in every step."""
    found = script.statement(caller)
    name = called.function.rpartition(".")[2]
    if found is None or name.startswith("__"):
        return True
    source, statement = found
    calls = [source.called(node) for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return name in (*calls, "forward", "<lambda>", "<module>")


def _loops_around(source: PythonSource, statement: ast.stmt) -> Iterator[ast.stmt]:
    """Of the same function, innermost first."""
    if isinstance(statement, _LOOPS):
        yield statement
    for node in source.parents_of(statement):
        if isinstance(node, _SCOPES):
            return
        if isinstance(node, _LOOPS):
            yield node


def _loops_with(name: str, loops: list[ast.stmt]) -> list[ast.stmt]:
    """From the innermost outwards, as long as the name is set outside."""
    return list(takewhile(lambda loop: not _is_set_in(loop, name), loops))


def _is_set_in(node: ast.AST, name: str) -> bool:
    return any(_sets(part, name) for part in ast.walk(node))


def _sets(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Name | ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node) == name
    )


def _only_setting(source: PythonSource, statement: ast.stmt, name: str) -> ast.stmt | None:
    """`self.model = ...`, if it stands once in the class, outside loops."""
    if not name.startswith("self."):
        return None
    parents = source.parents_of(statement)
    owner = next((node for node in parents if isinstance(node, ast.ClassDef)), None)
    if owner is None:
        return None
    settings = [
        node
        for node in ast.walk(owner)
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_set_in(node, name)
    ]
    if len(settings) != 1 or list(_loops_around(source, settings[0])):
        return None
    return settings[0]


# Remedies that are one environment variable, set where the command is started.


def add_setting(text: str, name: str, value: str) -> str:
    """`name:value` among comma-separated settings, in place of one of that name."""
    settings = [part.strip() for part in text.split(",") if part.strip()]
    others = [part for part in settings if part.partition(":")[0].strip() != name]
    return ",".join([*others, f"{name}:{value}"])


def add_path(text: str, path: str) -> str:
    """`path` first in a list of libraries to load, once."""
    others = [part for part in text.replace(":", " ").split() if part != path]
    return ":".join([path, *others])


def first_set(variables: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if variables.get(name)), None)
