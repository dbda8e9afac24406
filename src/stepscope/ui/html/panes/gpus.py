"""The step on other GPUs: one bar each, with its interval."""

from __future__ import annotations

from typing import Any

from stepscope.records.prediction import GpuComparison, GpuPrediction
from stepscope.text.figures import factor, interval, milliseconds, significant
from stepscope.text.words import sentence
from stepscope.ui.html.pane import Pane, ReportData
from stepscope.ui.topics.gpus import answer, fits_word, notes, work_word


def report_view(report: ReportData) -> dict[str, Any] | None:
    """None without a GPU in the trace, or with one that is not in the table."""
    if report.whatif is None or report.whatif.gpus is None:
        return None
    return gpus_view(report.whatif.gpus)


def gpus_view(comparison: GpuComparison) -> dict[str, Any]:
    rows = [row for row in comparison.gpus if row.step_ms is not None]
    longest = max((row.high_ms or 0.0 for row in rows), default=0.0) or 1.0
    says = answer(comparison)
    return {
        "verdict": sentence(says.verdict),
        "why": sentence(says.why),
        "work": work_word(comparison),
        "rows": [_row(comparison, row, longest) for row in rows],
        "notes": [sentence(note) for note in notes(comparison)],
    }


def _row(comparison: GpuComparison, row: GpuPrediction, longest: float) -> dict[str, Any]:
    """Places are percentages of the track."""
    step, low, high = row.step_ms or 0.0, row.low_ms or 0.0, row.high_ms or 0.0
    per_second = row.samples_per_s if comparison.counts_samples else 1e3 / step
    return {
        "gpu": row.gpu,
        "is_now": row.gpu == comparison.source_gpu,
        "fits": fits_word(row),
        "is_too_small": row.fits is False,
        "step": milliseconds(step),
        "interval": interval(low, high),
        "speed": f"{factor(row.speedup or 0.0)}x",
        "per_second": significant(per_second or 0.0),
        "decides": row.decides,
        "bar": 100 * step / longest,
        "low": 100 * low / longest,
        "width": 100 * (high - low) / longest,
    }


PANE = Pane(id="gpus", title="Other GPUs", order=32, view=report_view)
