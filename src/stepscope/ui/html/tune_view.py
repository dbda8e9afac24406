"""A tune as a picture: the baseline and every trial as bars, the table under it, and the patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.records.figures import interval, milliseconds, relative_change, size
from stepscope.records.tuning import (
    FAILED,
    NOT_KNOWN,
    TriedConfiguration,
    TuneResult,
    short_name,
    short_why,
)
from stepscope.ui.words import one_line, or_dash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup

    from stepscope.ui.answer import Answer

PARITY_WORDS = {
    "bit-identical": "losses are bit-identical",
    "rounding": "losses differ by rounding",
    "random": "losses differ by other random numbers",
    "training": "a different training",
    FAILED: "losses differ",
    NOT_KNOWN: "losses were not compared",
}
_BASELINE = "baseline"
_MOST_NAME = 80
_WIDEST_INTERVAL = 1.3  # times the longest step: what lies beyond ends at the picture's edge
_WIDEST = 98.0  # percent of the picture's width that the longest mark takes


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneBar:
    """One row of the picture; positions are percentages of its width."""

    name: str
    tone: str  # baseline, kept, still or failed
    width: float
    whisker: tuple[float, float] | None
    promised: float | None  # a hollow mark
    step: str
    change: str  # against the baseline
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRow:
    """One row of the table."""

    name: str
    promised: str
    measured: str
    between: str
    change: str
    memory: str
    parity: str
    parity_hint: str
    kept: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchLine:
    text: str
    tone: str  # add, cut, place, file or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneView:
    """What the pane and the page of a tune print."""

    answer: Answer
    baseline_at: float
    bars: tuple[TuneBar, ...]
    rows: tuple[TuneRow, ...]
    patch: str
    patch_lines: tuple[PatchLine, ...]
    by_hand: tuple[str, ...]
    variables: tuple[str, ...]
    run_with: str
    left_out: tuple[tuple[str, str], ...]
    curves: tuple[tuple[str, str, Markup], ...]  # name, parity in words, picture


def make_view(
    result: TuneResult,
    answer: Answer,
    *,
    run_with: str = "",
    curves: Sequence[tuple[str, str, Markup]] = (),
) -> TuneView:
    """The baseline must have been measured."""
    baseline_ms = result.baseline_ms or 0.0
    longest = _longest(result)
    return TuneView(
        answer=answer,
        baseline_at=_WIDEST * baseline_ms / longest,
        bars=tuple(_bars(result, baseline_ms, longest)),
        rows=tuple(_row(trial, result) for trial in result.trials),
        patch=result.patch or "",
        patch_lines=tuple(_patch_line(line) for line in (result.patch or "").splitlines()),
        by_hand=result.by_hand,
        variables=tuple(f"{name}={value}" for name, value in result.variables.items()),
        run_with=run_with,
        left_out=tuple((row.remedy, row.why) for row in result.left_out),
        curves=tuple((name, PARITY_WORDS.get(parity, parity), svg) for name, parity, svg in curves),
    )


def _longest(result: TuneResult) -> float:
    """What the picture's width stands for: the longest step, and its interval where that is not
    absurdly wide. Promises that are far off do not squeeze what was measured."""
    steps = [result.baseline_ms or 0.0, *(trial.measured_ms or 0.0 for trial in result.trials)]
    ends = [result.baseline_high_ms or 0.0, *(trial.high_ms or 0.0 for trial in result.trials)]
    longest = max(steps) or 1.0
    return max(longest, min(max(ends), _WIDEST_INTERVAL * longest))


def _bars(result: TuneResult, baseline_ms: float, longest: float) -> list[TuneBar]:
    """The baseline first, then the fastest first; what failed has no bar."""
    low, high = result.baseline_low_ms, result.baseline_high_ms
    base = TriedConfiguration(measured_ms=baseline_ms, low_ms=low, high_ms=high)
    measured = [trial for trial in result.trials if trial.measured_ms is not None]
    measured.sort(key=lambda trial: trial.measured_ms or 0.0)
    return [
        _bar(base, baseline_ms, longest, tone="baseline", name=_BASELINE),
        *(
            _bar(
                trial, baseline_ms, longest, tone=_tone(trial), name=_shown_name(trial, result.kept)
            )
            for trial in measured
        ),
    ]


def _tone(trial: TriedConfiguration) -> str:
    if trial.kept:
        return "kept"
    return "failed" if trial.parity == FAILED else "still"


def _bar(
    trial: TriedConfiguration, baseline_ms: float, longest: float, *, tone: str, name: str
) -> TuneBar:
    def at(ms: float) -> float:
        return min(max(_WIDEST * ms / longest, 0.0), 100.0)

    step = trial.measured_ms or 0.0
    ends = None
    if trial.low_ms is not None and trial.high_ms is not None:
        ends = (at(trial.low_ms), at(trial.high_ms))
    promise = trial.predicted_ms
    between = f" ({_between(trial)})" if ends else ""
    title = f"{name}: {milliseconds(step)}{between}"
    if promise is not None:
        title += f", predicted {milliseconds(promise)}"
    return TuneBar(
        name=name,
        tone=tone,
        width=at(step),
        whisker=ends,
        promised=None if promise is None else at(promise),
        step=milliseconds(step),
        change="" if tone == "baseline" else relative_change(step / baseline_ms - 1),
        title=title,
    )


def _row(trial: TriedConfiguration, result: TuneResult) -> TuneRow:
    baseline = result.baseline_ms
    change = trial.measured_ms / baseline - 1 if baseline and trial.measured_ms else None
    return TuneRow(
        name=_shown_name(trial, result.kept),
        promised=or_dash(trial.predicted_ms, milliseconds),
        measured=or_dash(trial.measured_ms, milliseconds),
        between=_between(trial),
        change=or_dash(change, relative_change),
        memory=or_dash(trial.peak_bytes, size),
        parity=trial.parity or "-",
        parity_hint=trial.parity_detail or PARITY_WORDS.get(trial.parity, ""),
        kept=trial.kept,
        why=one_line(short_why(trial, result.kept)),
    )


def _between(trial: TriedConfiguration) -> str:
    if trial.low_ms is None or trial.high_ms is None:
        return "-"
    return interval(trial.low_ms, trial.high_ms)


def _shown_name(trial: TriedConfiguration, kept: tuple[str, ...]) -> str:
    name = one_line(short_name(trial.remedies, kept)) or _BASELINE
    return name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}…"


_TONES: Mapping[str, str] = {"+++": "file", "---": "file", "@@": "place", "+": "add", "-": "cut"}


def _patch_line(line: str) -> PatchLine:
    tone = next((tone for start, tone in _TONES.items() if line.startswith(start)), "")
    return PatchLine(text=line, tone=tone)
