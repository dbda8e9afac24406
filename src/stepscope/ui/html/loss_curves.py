"""Small curves of the losses: each trial over the baseline, as far as their folders hold them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from stepscope.trace.decode import Oddities
from stepscope.trace.side_files import read_record
from stepscope.ui.html.svg import drawing, path, text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from markupsafe import Markup

    from stepscope.records.tuning import TuneResult

    Curve = Sequence[tuple[int, float]]  # step, loss

_MOST_CURVES = 24
_MOST_POINTS = 400
_WIDTH, _HEIGHT = 240.0, 70.0
_TOP, _BOTTOM = 4.0, 56.0
_BASELINE = "baseline"
_TRIAL, _MOST_BYTES = "trial.json", 64 << 20


def loss_curves(folder: Path, result: TuneResult) -> list[tuple[str, str, Markup]]:
    """For each configuration: its name, its parity, and the picture. Empty without losses."""
    baseline = _first_curve(folder, _baseline_runs(folder))
    if not baseline:
        return []
    curves = []
    for trial in result.trials[:_MOST_CURVES]:
        curve = _first_curve(folder, trial.runs)
        if curve:
            curves.append((trial.name, trial.parity, draw_losses(baseline, curve, trial.name)))
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


class _KeptLosses(msgspec.Struct, frozen=True):
    """The part of trial.json that is drawn: steps, and losses as float.hex writes them."""

    losses: list[tuple[int, str]] = []


def _first_curve(folder: Path, runs: Sequence[str]) -> Curve:
    """Of the first run that kept losses, by its lowest rank."""
    for run in runs:
        for rank in sorted((folder / run).glob("rank-*")):
            kept = read_record(rank / _TRIAL, _KeptLosses, Oddities(_TRIAL), _MOST_BYTES)
            if kept is not None and kept.losses:
                return _thinned(kept.losses)
    return ()


def _thinned(losses: Sequence[tuple[int, str]]) -> Curve:
    """The mean of each step's passes, at most so many steps."""
    by_step: dict[int, list[float]] = {}
    for step, digits in losses:
        by_step.setdefault(step, []).append(_number(digits))
    steps = sorted(by_step)[:: -(-len(by_step) // _MOST_POINTS)]
    return [(step, sum(by_step[step]) / len(by_step[step])) for step in steps]


def _number(digits: str) -> float:
    try:
        return float.fromhex(digits)
    except (ValueError, OverflowError):  # the file was damaged
        return math.nan
