"""Every number of a bench, as a table that can be sorted and filtered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.ui.html.table_data import make_table
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stepscope.records.bench_result import WorkloadResult

_COLUMNS = (
    "Workload:text",
    "Size:text",
    "Ranks:count",
    "Batch:count",
    "Changes:text",
    "Samples/s:number",
    "from:number",
    "to:number",
    "Step:ns",
    "Busy:share",
    "MFU:share",
    "CPU:share",
    "Peak memory:bytes",
    "predicted:bytes",
    "FLOPs of a step:flops",
    "Bytes of a step:bytes",
    "First loss:number",
    "Last loss:number",
    "Target:number",
    "Steps to it:count",
    "Time to it:ns",
    "Runs:count",
)
_LAST = "All runs took:ns"


def numbers_table(
    measured: Mapping[str, WorkloadResult], changes: Mapping[str, float | None]
) -> dict[str, Any]:
    """`changes` of the step are by key; empty where nothing is compared.

    Each kind of compute share and counter that any workload has is a column too.
    """
    results = measured.values()
    shares = list(dict.fromkeys(name for row in results for name in row.compute_share))
    counters = list(dict.fromkeys(name for row in results for name in row.counters))
    more = ["Change of the step:change"] if changes else []
    more += ["Times as fast:times"] if any(row.speedup for row in results) else []
    more += [f"{_plain(name)} peak:share" for name in shares]
    more += [f"{_plain(name)}:share" for name in counters]
    columns = " | ".join([*_COLUMNS, *more, _LAST])
    rows = [
        (
            *_row(result),
            *([changes.get(key)] if changes else []),
            *([result.speedup] if any(row.speedup for row in results) else []),
            *(result.compute_share.get(name) for name in shares),
            *(result.counters.get(name) for name in counters),
            None if result.seconds is None else result.seconds * 1e9,
        )
        for key, result in measured.items()
    ]
    return make_table("Workloads", columns, rows, sort=-1)


def _plain(name: str) -> str:
    """A heading must not look like two."""
    return one_line(name).replace("|", "/").replace(":", " ").replace("_", " ")


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None


def _row(result: WorkloadResult) -> tuple[Any, ...]:
    seconds = result.time_to_target_s
    return (
        one_line(result.name),
        one_line(result.size),
        result.ranks,
        _number(result.settings.get("batch")),
        one_line(" + ".join(result.remedies)),
        result.samples_per_s,
        result.low,
        result.high,
        None if result.step_ms is None else result.step_ms * 1e6,
        result.busy,
        result.mfu,
        result.cpu,
        result.peak_bytes,
        result.predicted_peak_bytes,
        result.flops,
        result.bytes_moved,
        result.loss_first,
        result.loss_last,
        result.target_loss,
        result.steps_to_target,
        None if seconds is None else seconds * 1e9,
        len(result.runs_ms) or None,
    )
