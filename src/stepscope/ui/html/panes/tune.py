"""What `stepscope tune` measured for this run's command: the report's section, and the
tune's own page.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from stepscope.errors import NotCapturedError
from stepscope.records.comparison import (
    FAILED,
    NOT_KNOWN,
    TriedConfiguration,
    TuneResult,
    short_name,
    short_why,
)
from stepscope.text.figures import interval, milliseconds, relative_change, size
from stepscope.trace.run_folder.related_runs import FoundTune, read_tune
from stepscope.ui.html.pane import Pane, ReportData
from stepscope.ui.html.render import render_page, render_part, write_atomically
from stepscope.ui.html.svg import drawing, path, text
from stepscope.ui.tried_remedies import run_command, tune_answer
from stepscope.ui.words import Answer, one_line, or_dash
from stepscope.verify.trials import Loss, losses_of, read_trial

if TYPE_CHECKING:
    Curve = Sequence[tuple[int, float]]

REPORT = "report.html"
STYLES = ("report.css", "tune.css")


def write_tune_report(folder: Path, path: Path | None = None) -> Path:
    """From the folder's tune.json; returns where the page is.

    UnreadableInputError if there is no tune.json, NotCapturedError if it has no baseline.
    """
    tune = FoundTune(folder, read_tune(folder))
    view = view_of_tune(tune)
    if view is None:
        raise NotCapturedError(f"{folder} has no measured baseline, so there is nothing to draw")
    page = render_page(
        "tune_page.html.j2",
        styles=STYLES,
        scripts=["tune_page"],
        title=view.answer.verdict,
        links=[("tune", "Trials")],
        command=shlex.join(tune.result.command),
        section=render_part("tune.html.j2", view=view, alone=True),
        view=view,
    )
    target = path or folder / REPORT
    write_atomically(target, page)
    return target


def view_of_tune(tune: FoundTune) -> TuneView | None:
    """None where not even the baseline was measured."""
    result = tune.result
    if result.baseline_ms is None:
        return None
    return make_view(
        result,
        tune_answer(result, tune.folder),
        run_with=run_command(result) if result.kept and result.command else "",
        curves=loss_curves(tune.folder, result),
    )


# A tune as a picture: the baseline and every trial as bars, the table under it, and the patch.

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


# Small curves of the losses: each trial over the baseline, as far as their folders hold them.

_MOST_CURVES = 24
_MOST_POINTS = 400
_WIDTH, _HEIGHT = 240.0, 70.0
_TOP, _BOTTOM = 4.0, 56.0


def loss_curves(folder: Path, result: TuneResult) -> list[tuple[str, str, Markup]]:
    """For each configuration: its name, its parity, and the picture. Empty without losses."""
    baseline = _first_curve(folder, _baseline_runs(folder))
    if not baseline:
        return []
    curves = []
    for trial in result.trials[:_MOST_CURVES]:
        curve = _first_curve(folder, trial.runs)
        if curve:
            name = short_name(trial.remedies, result.kept)
            curves.append((name, trial.parity, draw_losses(baseline, curve, name)))
    return curves


def draw_losses(baseline: Curve, trial: Curve, name: str) -> Markup:
    """The trial's thin line lies on the baseline's broad one where both train alike."""
    finite = [value for _, value in (*baseline, *trial) if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    first = min(curve[0][0] for curve in (baseline, trial))
    last = max(curve[-1][0] for curve in (baseline, trial))

    def place(step: int, value: float) -> tuple[float, float]:
        across = (step - first) / ((last - first) or 1)
        up = (value - low) / ((high - low) or 1.0)
        return 2 + (_WIDTH - 4) * across, _BOTTOM - (_BOTTOM - _TOP) * up

    def line(kind: str, curve: Curve) -> str:
        points = [place(step, value) for step, value in curve if math.isfinite(value)]
        return path(kind, points) if len(points) > 1 else ""

    parts = [
        line("base-loss", baseline),
        line("trial-loss", trial),
        text("", 2, _HEIGHT - 2, f"step {first}"),
        text("is-end", _WIDTH - 2, _HEIGHT - 2, f"step {last}"),
    ]
    return drawing(_WIDTH, _HEIGHT, f"Losses with {name} over those of the baseline", parts)


def _baseline_runs(folder: Path) -> list[str]:
    """Trials without a remedy first: they ran as long as the others."""
    plain = sorted(place.name for place in (folder / "trials").glob("*-baseline"))
    return [*(f"trials/{name}" for name in plain), _BASELINE]


def _first_curve(folder: Path, runs: Sequence[str]) -> Curve:
    """Of the first run that kept losses, by its lowest rank."""
    for run in runs:
        for _, losses in sorted(losses_of(read_trial(folder / run)).items()):
            return _thinned(losses)
    return ()


def _thinned(losses: Sequence[Loss]) -> Curve:
    """The mean of each step's passes, at most so many steps."""
    by_step: dict[int, list[float]] = {}
    for loss in losses:
        by_step.setdefault(loss.step, []).append(_number(loss))
    steps = sorted(by_step)[:: -(-len(by_step) // _MOST_POINTS)]
    return [(step, sum(by_step[step]) / len(by_step[step])) for step in steps]


def _number(loss: Loss) -> float:
    try:
        return loss.value
    except (ValueError, OverflowError):  # the file was damaged
        return math.nan


def tune_pane(report: ReportData) -> TuneView | None:
    return view_of_tune(report.tune) if report.tune is not None else None


PANE = Pane(id="tune", title="Tried", order=25, view=tune_pane)
