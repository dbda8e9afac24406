"""Show what is known of a file as the protocol's own types: hints, lenses, hovers,
diagnostics and code actions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lsprotocol import types
from msgspec.structs import replace

from stepscope.records.source_lines import LineCost
from stepscope.text.figures import mean_count, milliseconds, percent, size
from stepscope.text.words import finding_page
from stepscope.ui.editor.edits import LineChange, follow, rebase
from stepscope.ui.lsp.script_state import (
    OpenFile,
    ScriptState,
    ShownLine,
    TextOf,
    WorkspaceEdits,
    choose_costs,
    is_same_program,
    shown_lines,
    syntax_tree,
)

if TYPE_CHECKING:
    from stepscope.ui.lsp.measured_run import FindingNote, OfferedPatch, StepWhatIf

SOURCE = "stepscope"
_SEVERITY = {
    "high": types.DiagnosticSeverity.Warning,
    "medium": types.DiagnosticSeverity.Information,
    "low": types.DiagnosticSeverity.Hint,
}
_EFFECT = {
    "bit-identical": "bit-identical training",
    "rounding": "same training up to rounding",
    "random": "different random numbers",
    "training": "changes the training",
}


def inlay_hints(
    file: OpenFile, state: ScriptState, text_of: TextOf, first: int, last: int
) -> list[types.InlayHint]:
    """At the ends of the lines from `first` to `last`."""
    return [
        types.InlayHint(
            position=types.Position(shown.line - 1, file.width(shown.line - 1)),
            label=hint_words(shown),
            padding_left=True,
        )
        for shown in shown_lines(state, file.path, file.text, text_of)
        if first <= shown.line - 1 <= last and is_worth_a_hint(shown.cost)
    ]


def code_lenses(file: OpenFile, state: ScriptState, text_of: TextOf) -> list[types.CodeLens]:
    """The step above the script's first line, and each function's and loop's lines above it."""
    lenses = []
    if file.path == state.script:
        command = types.Command(
            _headline(state, text_of), "stepscope.profile", arguments=[file.uri]
        )
        lenses.append(types.CodeLens(range=_line_range(0), command=command))
    lines = shown_lines(state, file.path, file.text, text_of)
    for block in block_costs(file.text, lines):
        command = types.Command(block.words, "")
        lenses.append(types.CodeLens(range=_line_range(block.line - 1), command=command))
    return lenses


def _headline(state: ScriptState, text_of: TextOf) -> str:
    shown = choose_costs(state, text_of)
    if state.running_since is not None:
        step = f", step {state.live.step}" if state.live is not None and state.live.step else ""
        return f"stepscope: measuring{step}"
    if shown is None:
        return "stepscope: profile this script"
    about = "~" if shown.costs.kind == "estimated" else ""
    was = "was " if shown.trust == "stale" else ""
    return f"stepscope: {was}{about}{milliseconds(shown.costs.step_ms)} a step · profile again"


def hover(file: OpenFile, state: ScriptState, text_of: TextOf, line: int) -> types.Hover | None:
    lines = shown_lines(state, file.path, file.text, text_of)
    here = [shown for shown in lines if shown.line - 1 == line]
    found = [one.finding for one in _findings(file, state, text_of) if one.line - 1 == line]
    whatifs = state.measured.whatifs if state.measured is not None else ()
    words = hover_words(here, found, whatifs)
    if not words:
        return None
    content = types.MarkupContent(types.MarkupKind.Markdown, words)
    return types.Hover(contents=content, range=file.line_range(line))


def diagnostics(file: OpenFile, state: ScriptState, text_of: TextOf) -> list[types.Diagnostic]:
    """Findings at their lines. One about an older text is a hint that editors fade."""
    return [
        types.Diagnostic(
            range=file.line_range(one.line - 1),
            message=_message(one),
            severity=types.DiagnosticSeverity.Hint
            if one.stale
            else _SEVERITY[one.finding.severity],
            source=SOURCE,
            code=one.finding.id,
            code_description=types.CodeDescription(href=finding_page(one.finding.id)),
            tags=[types.DiagnosticTag.Unnecessary] if one.stale else None,
        )
        for one in _findings(file, state, text_of)
    ]


def _findings(file: OpenFile, state: ScriptState, text_of: TextOf) -> list[FindingLine]:
    """Return findings whose line is still in the file, as it is now."""
    measured, name = state.measured, str(file.path)
    if measured is None or name not in measured.costs.texts:
        return []
    placed = [
        (finding, place.line)
        for finding in measured.findings
        for place in finding.places
        if Path(place.file) == file.path and finding.severity in _SEVERITY
    ]
    same = is_same_program(measured.costs, text_of)
    places = tuple(LineCost(file=name, line=line, function="") for _, line in placed)
    followed = follow(replace(measured.costs, lines=places), file.path, file.text).lines
    return [
        FindingLine(finding=finding, line=now.line, stale=now.state == "stale" or not same)
        for (finding, _), now in zip(placed, followed, strict=True)
        if now.line is not None
    ]


def _message(one: FindingLine) -> str:
    finding = one.finding
    before = "before the last edits: " if one.stale else ""
    words = [f"{before}{finding.title}: {finding.summary}"]
    words += [f"- {remedy}" for remedy in finding.remedies]
    if finding.try_command:
        words.append(f"try: {finding.try_command}")
    return "\n".join(words)


def code_actions(
    file: OpenFile,
    state: ScriptState,
    text_of: TextOf,
    first: int,
    last: int,
    edits: WorkspaceEdits,
) -> list[types.CodeAction]:
    """Remedies that change these lines or answer a finding there: to apply, or to take back."""
    if state.measured is None:
        return []
    marks = [
        mark for mark in diagnostics(file, state, text_of) if first <= mark.range.start.line <= last
    ]
    actions = []
    for patch in state.measured.patches:
        answered = [mark for mark in marks if mark.code in patch.findings]
        for title, changes in _ways(patch, state.measured.costs.texts, text_of):
            if answered or _touches(changes.get(str(file.path), ()), first, last):
                actions.append(
                    types.CodeAction(
                        title=title,
                        kind=types.CodeActionKind.QuickFix
                        if answered
                        else types.CodeActionKind.RefactorRewrite,
                        diagnostics=answered or None,
                        edit=edits.of(changes),
                    )
                )
    return actions


def _ways(
    patch: OfferedPatch, texts: dict[str, str], text_of: TextOf
) -> Iterator[tuple[str, dict[str, Sequence[LineChange]]]]:
    """Apply it where it is not applied, take it back where it is."""
    saves = ""
    if patch.saved_ms is not None and patch.saved_ms > 0:
        saves = f", predicted to save {milliseconds(patch.saved_ms)} a step"
    effect = _EFFECT.get(patch.effect, patch.effect)
    before = {file: texts[file] for file in patch.after}
    applied = _rebased(before, patch.after, text_of)
    if applied is not None:
        yield f"{patch.action} ({patch.id}: {effect}{saves})", applied
    taken_back = _rebased(patch.after, before, text_of)
    if taken_back is not None:
        yield f"Undo {patch.id}: {patch.action}", taken_back


def _rebased(
    before: dict[str, str], after: dict[str, str], text_of: TextOf
) -> dict[str, Sequence[LineChange]] | None:
    """Move the changes of all files, or of none."""
    changes: dict[str, Sequence[LineChange]] = {}
    for file, text in before.items():
        now = text_of(Path(file))
        moved = rebase(text, after[file], now) if now is not None else None
        if moved is None:
            return None
        changes[file] = moved
    return changes


def _touches(changes: Sequence[LineChange], first: int, last: int) -> bool:
    """An insertion touches the lines on both sides of it."""
    return any(
        first <= max(one.end - 1, one.start) and last >= (one.start - (one.start == one.end))
        for one in changes
    )


def _line_range(line: int) -> types.Range:
    return types.Range(types.Position(line, 0), types.Position(line, 0))


# What a line costs, in words: at its end, above its function, and when the pointer rests on it.

SMALLEST_SHARE = 0.001  # of the step, below which a line gets no hint unless it keeps memory
SMALLEST_KEPT = 1_000_000  # bytes
_MOST_ROWS = 6
_MOST_WHATIFS = 3
_BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.AsyncFor, ast.While)
_STALE = "_Measured before the last edits; the code has changed since._"
_NO_TENSORS = re.compile(r"(, \[\])+\]$")
_ESTIMATED = "_Estimated, not measured: operator times of the last run, shapes of this text._"


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The lines of one function or loop together, at the line that it begins on (from 1)."""

    line: int
    words: str


def is_worth_a_hint(cost: LineCost) -> bool:
    return cost.share >= SMALLEST_SHARE or (cost.kept_bytes or 0) >= SMALLEST_KEPT


def hint_words(shown: ShownLine) -> str:
    """`3.20 ms · 12% · keeps 4.20 MB · 6 calls`; `~` marks an estimate, `was` an old figure."""
    words = _figures([shown])
    if shown.cost.calls is not None and shown.cost.calls > 1:
        words += f" · {mean_count(shown.cost.calls)} calls"
    return words


def _figures(lines: Sequence[ShownLine], of_step: str = "") -> str:
    """Add up the time, the share and the kept bytes of lines."""
    about = "~" if any(one.estimated for one in lines) else ""
    total = sum(one.cost.total_ms for one in lines)
    share = sum(one.cost.share for one in lines)
    kept = sum(one.cost.kept_bytes or 0 for one in lines)
    words = f"{about}{milliseconds(total)} · {about}{percent(share)}{of_step}"
    if kept:
        words += f" · keeps {about}{size(kept)}"
    return f"was {words}" if any(one.trust == "stale" for one in lines) else words


def block_costs(text: str, lines: Sequence[ShownLine]) -> list[BlockCost]:
    """Functions and loops whose own lines take time, without loops that are all of their function;
    none while the text is not Python."""
    tree = syntax_tree(text)
    if tree is None:
        return []
    blocks = [node for node in ast.walk(tree) if isinstance(node, _BLOCKS)]
    costs: dict[frozenset[int], BlockCost] = {}
    for block in sorted(blocks, key=lambda node: node.lineno):  # the outer ones first
        inside = [one for one in lines if block.lineno <= one.line <= (block.end_lineno or 0)]
        worth = frozenset(one.line for one in inside if is_worth_a_hint(one.cost))
        if worth and worth not in costs:
            words = f"{_figures(inside, ' of the step')} in its own lines"
            costs[worth] = BlockCost(block.lineno, words)
    return list(costs.values())


def hover_words(
    lines: Sequence[ShownLine], findings: Iterable[FindingNote], whatifs: Iterable[StepWhatIf]
) -> str:
    """Markdown: the breakdown of a line, the findings about it, and what would help the step."""
    parts: list[str] = []
    for shown in lines:
        caution = _STALE if shown.trust == "stale" else _ESTIMATED if shown.estimated else ""
        parts += [f"**{hint_words(shown)}**", caution, *_tables(shown.cost)]
    parts += [
        f"**[{finding.title}]({finding_page(finding.id)})**: {finding.summary}"
        for finding in findings
    ]
    faster = list(whatifs)[:_MOST_WHATIFS]
    if lines and faster:
        rows = [(f"{_cell(one.label)} ({_code(one.setting)})", one.gain) for one in faster]
        parts += ["What if, for the whole step:", _table(("change", "gain"), rows)]
    return "\n\n".join(part for part in parts if part)


def _tables(cost: LineCost) -> Iterator[str]:
    phases = [
        ("forward", cost.forward_ms),
        ("backward", cost.backward_ms),
        ("optimizer", cost.optimizer_ms),
        ("other", cost.other_ms),
    ]
    total = cost.total_ms
    rows = [
        (name, milliseconds(ms), percent(ms / total) if total else "") for name, ms in phases if ms
    ]
    yield _table(("phase", "ms a step", "of the line"), rows)
    if cost.kept_bytes is not None:
        yield f"{size(cost.kept_bytes)} saved for backward"
    operators = sorted(cost.operators, key=lambda one: -one.ms)[:_MOST_ROWS]
    yield _table(
        ("operator", "calls", "ms a step", "shapes"),
        [
            (
                _code(one.name),
                mean_count(one.calls),
                milliseconds(one.ms),
                # Without the empty ones that stand for options after the last tensor.
                _code(_NO_TENSORS.sub("]", one.shapes or "")),
            )
            for one in operators
        ],
    )
    kernels = sorted(cost.kernels, key=lambda one: -one.ms)[:_MOST_ROWS]
    yield _table(
        ("kernel", "ms a step"), [(_code(one.name), milliseconds(one.ms)) for one in kernels]
    )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Write a table; nothing without rows."""
    if not rows:
        return ""
    ruler = tuple("---" for _ in head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ruler, *rows))


def _cell(text: str) -> str:
    """Text of others inside a table: no row or column may begin in it."""
    return " ".join(text.replace("|", "\\|").split())


def _code(text: str) -> str:
    words = _cell(text.replace("`", "'"))
    return f"`{words}`" if words else ""


# Findings of a run at lines of one file, as the file is now.


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingLine:
    """A finding at a line (from 1)."""

    finding: FindingNote
    line: int
    stale: bool  # the line or the program is another now
