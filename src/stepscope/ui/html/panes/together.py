"""Training through a parameter server: who waits, how stale reads are, and whether it pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.explain.together.words import describe_staleness
from stepscope.records.figures import duration, milliseconds, percent, significant, size
from stepscope.ui.html.pane import Pane, ReportData
from stepscope.ui.html.together_charts import loss_over, staleness_bars, worker_bars
from stepscope.ui.together import PARTS, together_line

if TYPE_CHECKING:
    from stepscope.records.together_summary import ShardLoad, TogetherSummary

_MOST_MATRIX = 16  # workers; with more, pairs are listed


def together_view(report: ReportData) -> dict[str, Any] | None:
    summary = report.explanation.together
    if summary is None:
        return None
    losses = summary.losses
    return {
        "summary": summary,
        "headline": together_line(summary),
        "staleness_words": "; ".join(describe_staleness(summary)),
        "parts": list(PARTS.items()),
        "bars": worker_bars(summary),
        "staleness": staleness_bars(summary),
        "blocks": _matrix(summary),
        "pairs": [
            (pair.worker, pair.by, duration(pair.blocked_ns), f"{pair.times:,}")
            for pair in summary.blocks[:_MOST_MATRIX]
        ],
        "shards": [_shard_row(shard) for shard in summary.shards],
        "bytes": [
            (worker.worker, size(worker.pushed_bytes), size(worker.pulled_bytes), worker.resent)
            for worker in summary.workers
        ],
        "losses": [
            chart
            for chart in (
                loss_over(losses, lambda point: point.s, "seconds"),
                loss_over(losses, lambda point: float(point.updates), "updates"),
            )
            if chart is not None
        ],
        "faults": _faults(summary),
    }


def _matrix(summary: TogetherSummary) -> dict[str, Any] | None:
    """Rows wait, columns are waited for; the shade is the share of the longest."""
    workers = [worker.worker for worker in summary.workers]
    if not summary.blocks or len(workers) > _MOST_MATRIX:
        return None
    blocked = {(pair.worker, pair.by): pair for pair in summary.blocks}
    most = max(pair.blocked_ns for pair in summary.blocks)
    rows = []
    for worker in workers:
        pairs = [blocked.get((worker, other)) for other in workers]
        cells = [
            (duration(pair.blocked_ns), round(100 * pair.blocked_ns / most)) if pair else ("", 0)
            for pair in pairs
        ]
        rows.append((worker, cells))
    return {"workers": workers, "rows": rows}


def _shard_row(shard: ShardLoad) -> tuple[str, ...]:
    return (
        str(shard.shard),
        "-" if shard.size_bytes is None else size(shard.size_bytes),
        f"{shard.updates:,}",
        f"{shard.pulls:,}",
        percent(shard.busy_share),
        "-" if shard.mean_queue is None else significant(shard.mean_queue),
        "-" if shard.largest_queue is None else str(shard.largest_queue),
        "-" if shard.mean_wait_ms is None else milliseconds(shard.mean_wait_ms),
    )


def _faults(summary: TogetherSummary) -> list[str]:
    faults = []
    if summary.evicted:
        faults.append(f"evicted workers: {', '.join(map(str, summary.evicted))}")
    if summary.restored:
        faults.append(
            f"restored shards: {', '.join(map(str, summary.restored))}; updates lost with them: "
            f"{summary.lost_updates:,}"
        )
    return faults


PANE = Pane(id="together", title="Server", order=33, view=together_view)
