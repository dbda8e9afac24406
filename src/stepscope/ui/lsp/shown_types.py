"""What is known of a file as the protocol's own types. Lines and characters count from 0 there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lsprotocol import types

from stepscope.records.addresses import finding_page
from stepscope.records.figures import milliseconds
from stepscope.ui.lsp.findings_at_lines import findings_in
from stepscope.ui.lsp.line_words import block_costs, hint_words, hover_words, is_worth_a_hint
from stepscope.ui.lsp.rebased_change import rebase
from stepscope.ui.lsp.script_state import choose_costs, is_same_program, shown_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepscope.ui.lsp.findings_at_lines import FindingLine
    from stepscope.ui.lsp.offered_patch import OfferedPatch
    from stepscope.ui.lsp.open_file import OpenFile
    from stepscope.ui.lsp.rebased_change import LineChange
    from stepscope.ui.lsp.script_state import ScriptState, TextOf
    from stepscope.ui.lsp.workspace_edits import WorkspaceEdits

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
    if state.measured is None:
        return []
    same = is_same_program(state.measured.costs, text_of)
    placed = findings_in(state.measured, file.path, file.text, same_program=same)
    return [one for one in placed if one.finding.severity in _SEVERITY]


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
    """In all files, or not at all."""
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
