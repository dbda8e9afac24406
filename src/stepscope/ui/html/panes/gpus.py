"""The step on other GPUs: one bar each, with its interval."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from stepscope.records.prediction import GpuComparison
from stepscope.text.words import sentence
from stepscope.ui.html.pane import Pane, ReportData
from stepscope.ui.topics.gpus import gpu_table, gpus_answer, gpus_notes, work_word


def report_view(report: ReportData) -> dict[str, Any] | None:
    """None without a GPU in the trace, or with one that is not in the table."""
    if report.whatif is None or report.whatif.gpus is None:
        return None
    return gpus_view(report.whatif.gpus)


def gpus_view(comparison: GpuComparison) -> dict[str, Any]:
    """Places are percentages of the track."""
    known = tuple(row for row in comparison.gpus if row.step_ms is not None)
    longest = max((row.high_ms or 0.0 for row in known), default=0.0) or 1.0
    answer = gpus_answer(comparison)
    cells = gpu_table(replace(comparison, gpus=known)).for_page().rows
    rows = []
    for row, words in zip(known, cells, strict=True):
        step, low, high = row.step_ms or 0.0, row.low_ms or 0.0, row.high_ms or 0.0
        rows.append(
            {
                "name": words[0],
                "cells": words[1:],
                "is_now": row.gpu == comparison.source_gpu,
                "is_too_small": row.fits is False,
                "decides": row.decides,
                "bar": 100 * step / longest,
                "low": 100 * low / longest,
                "width": 100 * (high - low) / longest,
            }
        )
    return {
        "verdict": sentence(answer.verdict),
        "why": sentence(answer.why),
        "work": work_word(comparison),
        "rows": rows,
        "notes": [sentence(note) for note in gpus_notes(comparison)],
    }


PANE = Pane(id="gpus", title="Other GPUs", order=32, view=report_view)
