"""What `stepscope tune` found, as tune.json holds it, and what one remedy gained when it was tried.

Field names are the words of the JSON contract (docs/reference/json.md, `tune --json`). Steps are in
milliseconds; null means not known.
"""

from __future__ import annotations

import msgspec

from stepscope.text.figures import interval, milliseconds, significant

# Parity of what crashed or trains otherwise, and of what nobody could look at.
FAILED, NOT_KNOWN = "failed", "not known"


KEPT = "the kept changes"


class TriedConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """One row of tune.json's trials: some remedies, applied together."""

    remedies: tuple[str, ...] = ()
    predicted_ms: float | None = None
    predicted_low_ms: float | None = None
    predicted_high_ms: float | None = None
    measured_ms: float | None = None  # None where it failed before its steps were measured
    low_ms: float | None = None
    high_ms: float | None = None
    peak_bytes: int | None = None
    parity: str = ""
    parity_detail: str = ""
    kept: bool = False
    why: str = ""
    runs: tuple[str, ...] = ()  # folders of its trials, below the tune folder

    @property
    def name(self) -> str:
        return " + ".join(self.remedies)


class RemedyLeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A remedy that was not tried, and why."""

    remedy: str = ""
    why: str = ""


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """tune.json. Every part may be missing: a tune that was stopped early knows less."""

    schema: int = 1
    command: tuple[str, ...] = ()
    folder: str | None = None  # the working folder of the command
    status: str = ""
    baseline_ms: float | None = None
    baseline_low_ms: float | None = None
    baseline_high_ms: float | None = None
    best_ms: float | None = None
    best_low_ms: float | None = None
    best_high_ms: float | None = None
    speedup: float | None = None
    kept: tuple[str, ...] = ()
    trials: tuple[TriedConfiguration, ...] = ()
    left_out: tuple[RemedyLeftOut, ...] = ()
    patch: str | None = None
    by_hand: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    control: str = ""  # what baseline against baseline shows
    baseline_peak_bytes: int | None = None
    starts_differ: float | None = None  # by so much of a step, where that left a remedy undecided
    verdict: str = ""


def short_name(remedies: tuple[str, ...], kept: tuple[str, ...]) -> str:
    """Named by how it differs from what is kept, where that is shorter and as clear."""
    out = [name for name in kept if name not in remedies]
    new = [name for name in remedies if name not in kept]
    whole = " + ".join(remedies)
    if len(kept) < 2 or len(remedies) < 2 or len(out) > 1 or len(new) > 1 or not (out or new):
        return whole
    if not new:
        return f"without {out[0]}"
    return f"with {new[0]}" if not out else f"{new[0]} instead of {out[0]}"


def short_why(trial: TriedConfiguration, kept: tuple[str, ...]) -> str:
    """The reason, in which what is kept is not spelt out again."""
    whole = " + ".join(kept)
    return trial.why.replace(whole, KEPT) if len(kept) > 1 else trial.why


class TriedRemedy(msgspec.Struct, frozen=True, kw_only=True):
    """One remedy on its own, measured against the baseline."""

    remedy: str  # as it was tried: bf16, bucket-mb=50
    baseline_ms: float
    measured_ms: float | None  # None: the training failed with it
    low_ms: float | None
    high_ms: float | None
    kept: bool
    why: str = ""
    parity: str = ""
    tune: str = ""  # the tune folder

    def saved(self, step_ms: float | None) -> float | None:
        """Of the baseline, with a step of this length."""
        return None if step_ms is None else self.baseline_ms - step_ms

    @property
    def label(self) -> str:
        return "tried" if self.measured_ms is None else "measured"

    @property
    def words(self) -> str:
        """bf16 38.1 -> 21.0 ms (20.6 to 21.4), kept."""
        if self.measured_ms is None or self.low_ms is None or self.high_ms is None:
            return f"{self.remedy} failed: {self.why or 'no step was measured'}"
        step = f"{significant(self.baseline_ms)} -> {milliseconds(self.measured_ms)}"
        ends = interval(self.low_ms, self.high_ms)
        return f"{self.remedy} {step} ({ends}), {self.fate}"

    @property
    def fate(self) -> str:
        if self.kept:
            return "kept"
        return f"not kept: {self.why}" if self.why else "not kept"


def best_alone(result: TuneResult, tune: str = "") -> dict[str, TriedRemedy]:
    """By remedy id: its best value, of those that were tried alone. One that was kept is best."""
    best: dict[str, TriedRemedy] = {}
    for trial in result.trials:
        tried = _alone(result, trial, tune)
        if tried is None:
            continue
        name = tried.remedy.partition("=")[0]
        known = best.get(name)
        if known is None or by_result(tried) < by_result(known):
            best[name] = tried
    return best


def _alone(result: TuneResult, trial: TriedConfiguration, tune: str) -> TriedRemedy | None:
    if len(trial.remedies) != 1 or result.baseline_ms is None:
        return None
    if trial.measured_ms is None and trial.parity != FAILED:
        return None  # there was no time for it
    return TriedRemedy(
        remedy=trial.remedies[0],
        baseline_ms=result.baseline_ms,
        measured_ms=trial.measured_ms,
        low_ms=trial.measured_ms if trial.low_ms is None else trial.low_ms,
        high_ms=trial.measured_ms if trial.high_ms is None else trial.high_ms,
        kept=trial.kept or trial.remedies[0] in result.kept,
        why=trial.why,
        parity=trial.parity,
        tune=tune,
    )


def by_result(tried: TriedRemedy) -> tuple[bool, bool, float]:
    """To sort by: what was kept, then the fastest, then what failed."""
    return not tried.kept, tried.measured_ms is None, tried.measured_ms or 0.0
