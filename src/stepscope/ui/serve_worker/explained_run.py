"""What only a run's traces say about it: verdict and MFU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.open_engine import open_engine
from stepscope.ui.cli.explain import explain_paths
from stepscope.ui.serve.run_summary import RunSummary, device_words, short_text

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.explanation import Explanation


def explain_run(folder: Path) -> RunSummary:
    """Verdict, MFU and what else only the traces say; fields that stay None are not known."""
    with open_engine("pool", 1) as engine:  # a training may need the other cores
        explanation = explain_paths([folder], cache=True, html=None, quiet=True, engine=engine)
    slowest = max(explanation.ranks, key=lambda rank: rank.budget.step_ms, default=None)
    memory = slowest.memory if slowest else None
    return RunSummary(
        state="",
        verdict=short_text(explanation.verdict),
        mfu=_mfu(explanation),
        step_ms=explanation.budget.step_ms or None,
        device=device_words(slowest.device) if slowest and slowest.device else None,
        peak_bytes=memory.peak_bytes if memory else None,
    )


def _mfu(explanation: Explanation) -> float | None:
    """Of the rank that uses its device least: the others wait for it or do its work."""
    known = [rank.efficiency.mfu for rank in explanation.ranks if rank.efficiency is not None]
    return min((mfu for mfu in known if mfu is not None), default=None)
