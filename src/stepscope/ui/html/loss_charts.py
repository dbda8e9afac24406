"""Small curves of the losses: each trial over the baseline, as far as their folders hold them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stepscope.records.tuning import short_name
from stepscope.ui.html.svg import drawing, path, text
from stepscope.verify.trial_file import losses_of, read_trial

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from markupsafe import Markup

    from stepscope.records.tuning import TuneResult
    from stepscope.verify.trial_file import Loss

    Curve = Sequence[tuple[int, float]]  # step, loss

_MOST_CURVES = 24
_MOST_POINTS = 400
_WIDTH, _HEIGHT = 240.0, 70.0
_TOP, _BOTTOM = 4.0, 56.0
_BASELINE = "baseline"


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
