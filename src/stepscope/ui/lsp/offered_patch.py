"""Remedies as patches of the measured program: what a code action applies or takes back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.fix.chosen import ChosenFix
from stepscope.fix.patched_source import patch_source
from stepscope.fix.remedies import FIXES
from stepscope.records.remedies import REMEDIES
from stepscope.ui.tried_remedies import applicable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stepscope.fix.declaration import Fix
    from stepscope.records.explanation import Finding
    from stepscope.records.script_facts import ScriptFacts


class OfferedPatch(msgspec.Struct, frozen=True, kw_only=True):
    """One remedy. `after` holds the files that it changes, as they are with it."""

    id: str  # as `stepscope tune --only` takes it, with its value
    action: str
    effect: str  # on the numbers of the training
    after: dict[str, str]
    findings: tuple[str, ...] = ()  # ids of those that offer it
    saved_ms: float | None = None  # predicted or measured, per step


def offer_patches(
    facts: ScriptFacts, texts: Mapping[str, str], findings: Iterable[Finding]
) -> tuple[OfferedPatch, ...]:
    """Every remedy that fits and can be made by editing these files; the findings' own first."""
    findings = list(findings)
    asked = [name for finding in findings for name in applicable(finding)]
    offers = []
    for name in dict.fromkeys((*asked, *FIXES)):
        offer = _offer(FIXES[name], facts, texts, findings)
        if offer is not None:
            offers.append(offer)
    return tuple(offers)


def _offer(
    fix: Fix, facts: ScriptFacts, texts: Mapping[str, str], findings: list[Finding]
) -> OfferedPatch | None:
    value = next((one for one in fix.values_for(facts) if fix.fits(facts, one) is None), None)
    if value is None:
        return None

    def read(file: str) -> bytes | None:
        text = texts.get(file, texts.get(str(Path(file).resolve())))
        return text.encode() if text is not None else None

    chosen = ChosenFix(fix, value)
    patched = patch_source(facts, [chosen], read)
    if not patched.after or patched.by_hand or patched.variables:
        return None  # a half of a remedy is none
    offering = [finding for finding in findings if fix.id in applicable(finding)]
    return OfferedPatch(
        id=str(chosen),
        action=REMEDIES[fix.id].action,
        effect=fix.effect.value,
        after={_key(file, texts): text.decode() for file, text in patched.after.items()},
        findings=tuple(finding.id for finding in offering),
        saved_ms=_saved_ms(fix.id, offering),
    )


def _key(file: str, texts: Mapping[str, str]) -> str:
    return file if file in texts else str(Path(file).resolve())


def _saved_ms(remedy: str, findings: Iterable[Finding]) -> float | None:
    """As measured by `tune`, else as predicted where the whole interval is a saving."""
    for finding in findings:
        for one in finding.remedies:
            if one.id == remedy and one.measured_ms is not None:
                return one.measured_ms
            if one.id == remedy and one.gain is not None and one.gain.is_sure:
                return None if one.gain.changes_samples else one.gain.saved_ms
    return None
