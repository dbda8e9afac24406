"""Which remedies are tried on this training, in which order, and why the others are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.errors import UsageError
from stepscope.fix.chosen import ChosenFix, choose
from stepscope.fix.declaration import Effect
from stepscope.fix.remedies import FIXES
from stepscope.ui.tune.journal import LeftOut, PlannedRemedy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stepscope.records.script_facts import ScriptFacts

EFFECT_WORDS = {
    Effect.BIT_IDENTICAL: "changes no number",
    Effect.ROUNDING: "rounds differently",
    Effect.RANDOM: "draws other random numbers",
    Effect.TRAINING: "changes the training",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingRemedies:
    """What fits a training: what is tried, what only a patch can do, and what is left out."""

    candidates: tuple[ChosenFix, ...]
    late: tuple[ChosenFix, ...]  # they may fit once another one is kept
    proposals: tuple[ChosenFix, ...]
    left_out: tuple[LeftOut, ...]  # `late` ones too: nothing may be kept


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRemedies:
    """--only, --skip and --allow. Without --only everything is wanted that may save time."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    allow: Effect = Effect.ROUNDING
    saves_memory: bool = False  # what saves memory and costs time is wanted too

    @classmethod
    def parse(
        cls, only: Sequence[str], skip: Sequence[str], allow: str, *, saves_memory: bool = False
    ) -> WantedRemedies:
        """UsageError for an id that nothing has."""
        only = [_own_spelling(text) for text in only]
        skip = [_own_spelling(text) for text in skip]
        if both := set(only) & set(skip):
            raise UsageError(f"{min(both)} is in both --only and --skip")
        return cls(
            only=tuple(only), skip=tuple(skip), allow=Effect(allow), saves_memory=saves_memory
        )

    def wants(self, chosen: ChosenFix) -> bool:
        return (not self.only or _named(chosen, self.only)) and not _named(chosen, self.skip)

    def listed(self, facts: ScriptFacts) -> Iterable[ChosenFix]:
        """Every remedy and value that is wanted on this script, in declared order."""
        for remedy in FIXES.values():
            asked = [
                text.partition("=")[2]
                for text in self.only
                if text.partition("=")[0] == remedy.id and "=" in text
            ]
            values = dict.fromkeys((*remedy.values_for(facts), *asked))
            yield from filter(self.wants, (ChosenFix(remedy, value) for value in values))


def _own_spelling(text: str) -> str:
    """Return a name as tune prints it: a name without a value stays so, and means all values."""
    chosen = choose(text)
    return chosen.remedy.id if text.strip() == chosen.remedy.id else str(chosen)


def _named(chosen: ChosenFix, texts: Iterable[str]) -> bool:
    """By its id, which means all of its values, or with its value."""
    return any(text in (chosen.remedy.id, str(chosen)) for text in texts)


def fitting_remedies(facts: ScriptFacts, wanted: WantedRemedies) -> FittingRemedies:
    candidates, late, proposals, left_out = [], [], [], []
    for chosen in wanted.listed(facts):
        why = _why_not(chosen, facts, wanted)
        if why is not None:
            left_out.append(LeftOut(remedy=str(chosen), why=why))
            if chosen.remedy.after and _is_allowed(chosen, wanted.allow):
                late.append(chosen)
        elif chosen.remedy.is_proposal:
            proposals.append(chosen)
        else:
            candidates.append(chosen)
    return FittingRemedies(
        candidates=tuple(candidates),
        late=tuple(late),
        proposals=tuple(proposals),
        left_out=tuple(_joined(left_out)),
    )


def _why_not(chosen: ChosenFix, facts: ScriptFacts, wanted: WantedRemedies) -> str | None:
    """A remedy's own mistake is no reason to fail: it is left out and says so."""
    try:
        why = chosen.remedy.fits(facts, chosen.value)
    except Exception as error:
        return f"a defect in stepscope: {type(error).__name__}: {error}"
    if why is not None:
        return why
    if chosen.remedy.saves == "memory" and not wanted.saves_memory and not wanted.only:
        return "it saves memory and costs time. --memory-limit or --only tries it"
    if not _is_allowed(chosen, wanted.allow):
        effect = chosen.remedy.effect
        return f"it {EFFECT_WORDS[effect]}. --allow {effect} tries it"
    return None


def _is_allowed(chosen: ChosenFix, allowed: Effect) -> bool:
    """One that may do less than its worst is tried: its losses show what it did."""
    return (chosen.remedy.may_be or chosen.remedy.effect).level <= allowed.level


def _joined(left_out: Iterable[LeftOut]) -> list[LeftOut]:
    """Values of one remedy that are left out for one reason are named once."""
    rows: dict[tuple[str, str], LeftOut] = {}
    for row in left_out:
        name = row.remedy.partition("=")[0]
        known = (name, row.why) in rows
        rows[name, row.why] = LeftOut(remedy=name, why=row.why) if known else row
    return list(rows.values())


def in_order(
    candidates: Sequence[ChosenFix],
    predicted: Mapping[str, PlannedRemedy],
    leading: Sequence[str] = (),
) -> tuple[PlannedRemedy, ...]:
    """Remedies of the `leading` finding first. Then the largest predicted gain, with the best value
    of each remedy; then those without a prediction as they are declared, other values, and last
    what is predicted not to help."""
    planned = [predicted.get(str(one)) or PlannedRemedy(remedy=str(one)) for one in candidates]
    best: dict[str, float] = {}
    for row in planned:
        if row.predicted_ms is not None:
            name = row.remedy.partition("=")[0]
            best[name] = min(row.predicted_ms, best.get(name, row.predicted_ms))

    def place(row: PlannedRemedy) -> tuple[bool, int, float]:
        name = row.remedy.partition("=")[0]
        later = name not in leading or row.hopeless
        if row.predicted_ms is None:
            return later, 1, 0.0
        if row.hopeless:
            return later, 3, row.predicted_ms
        return later, (0 if row.predicted_ms == best[name] else 2), row.predicted_ms

    return tuple(sorted(planned, key=place))  # stable: declared order among equals
