"""A finding and a what-if as the editor shows them: small enough to pass between processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.records.place import Place
from stepscope.ui.lsp.rebased_change import line_changes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from stepscope.records.explanation import Advice, Finding
    from stepscope.records.line_costs import LineCost, LineCosts
    from stepscope.ui.lsp.offered_patch import OfferedPatch

# What of a line's time a finding is about.
_ABOUT: dict[str, Callable[[LineCost], float]] = {
    "data-loading": lambda line: line.other_ms,
    "dominant-kernel": lambda line: line.total_ms - line.other_ms,
}


class FindingNote(msgspec.Struct, frozen=True, kw_only=True):
    """A finding at lines of the measured program."""

    id: str
    title: str
    severity: str
    summary: str
    places: tuple[Place, ...] = ()
    remedies: tuple[str, ...] = ()  # what would help, in words
    try_command: str | None = None


class StepWhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """A change that would probably make training faster."""

    label: str
    setting: str  # as `stepscope whatif --set` takes it
    gain: str  # what it buys, with its interval


def note_finding(
    finding: Finding, script: Path, costs: LineCosts, patches: Sequence[OfferedPatch]
) -> FindingNote:
    """Where it says; else where its remedy's patch begins; else at the line that costs most of
    what it is about; else at the script's first line."""
    said = [Place(file=one.file, line=one.line) for one in finding.where if one.file in costs.texts]
    patched = next(_patched(finding, costs, patches), None)
    first = Place(file=str(script), line=1)
    places = list(dict.fromkeys(said)) or [patched or _costliest(finding, costs) or first]
    return FindingNote(
        id=finding.id,
        title=finding.title,
        severity=finding.severity,
        summary=finding.summary,
        places=tuple(places),
        remedies=tuple(remedy.summary for remedy in finding.remedies),
        try_command=finding.try_command,
    )


def _patched(
    finding: Finding, costs: LineCosts, patches: Sequence[OfferedPatch]
) -> Iterator[Place]:
    for patch in patches:
        if finding.id not in patch.findings:
            continue
        for file, after in patch.after.items():
            changes = line_changes(costs.texts[file], after)
            if changes:
                yield Place(file=file, line=changes[-1].start + 1)  # imports come first


def _costliest(finding: Finding, costs: LineCosts) -> Place | None:
    """None for a finding that is about no line, and where no line accounts for most of it."""
    amount = _ABOUT.get(finding.id)
    if amount is None:
        return None
    line = max(costs.lines, key=amount, default=None)
    if line is None or amount(line) < finding.share * costs.step_ms / 2:
        return None
    return Place(file=line.file, line=line.line)


def whatifs(advice: Sequence[Advice]) -> tuple[StepWhatIf, ...]:
    """Those that are predicted to help, the best first."""
    return tuple(
        StepWhatIf(
            label=one.label,
            setting=one.setting,
            gain=" ".join(filter(None, one.gain.words())),
        )
        for one in advice
        if one.verdict == "faster"
    )
