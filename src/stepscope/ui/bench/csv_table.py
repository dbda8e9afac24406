"""A bench's results as CSV: one line a row, one column a number; empty where it is not known."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.bench_result import BenchResults, WorkloadResult

_LEFT_OUT = ("steps_ms",)  # thousands of numbers: the JSON has them


def write_csv(results: BenchResults, path: Path) -> None:
    """OSError if it cannot be written."""
    rows = [_flat(row) for row in results.workloads]
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns), restval="")
        writer.writeheader()
        writer.writerows(rows)


def _flat(row: WorkloadResult) -> dict[str, Any]:
    """memory {"parameters": 4} is the column memory.parameters; several values are one cell."""
    flat: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(row).items():
        if name in _LEFT_OUT:
            continue
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return flat
