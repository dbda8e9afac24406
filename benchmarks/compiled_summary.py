"""The rows of compiled_table.py as docs/records/efficiency.md has them: a line per way of a model.

    python benchmarks/compiled_summary.py rows.json [OLDER.json ...]

Precisions stand beside each other: bf16 / tf32 / fp32. A row that a file lacks is taken from the
next one. Steps with a star have no times of their own steps: their MFU is against steps timed
before the window.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

TITLES = {
    "resnet50": "ResNet-50",
    "gpt2": "GPT-2 small",
    "llama": "Llama 200 M",
    "unet": "U-Net",
    "bert": "BERT",
}
WAYS = (
    "eager",
    "default",
    "reduce-overhead",
    "max-autotune-no-cudagraphs",
    "whole-step graph",
    "graphed callables",
)
PRECISIONS = ("bf16", "tf32", "fp32")

Row = dict[str, Any]


def main() -> int:
    files = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    if not files:
        print(__doc__)
        return 2
    print(summary(first_of_each(files)))
    return 0


def first_of_each(files: Iterable[Sequence[Row]]) -> list[Row]:
    found: dict[tuple[str, str, str], Row] = {}
    for rows in files:
        for row in rows:
            if "error" not in row:
                found.setdefault((row["model"], row["way"], row["precision"]), row)
    return list(found.values())


def summary(rows: Sequence[Row]) -> str:
    """Below the table: how many rows there are, and the worst of each figure."""
    lines = [
        "| | step, ms | MFU | peak | with operator | with line |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    by_case = {(row["model"], row["way"], row["precision"]): row for row in rows}
    for model, title in TITLES.items():
        for way in WAYS:
            here = [by_case.get((model, way, precision)) for precision in PRECISIONS]
            if any(here):
                lines.append(f"| {title}, {way} | {' | '.join(_cells(here))} |")
    return "\n".join([*lines, "", *_worst(rows)])


def _cells(here: Sequence[Row | None]) -> list[str]:
    return [
        _beside(here, lambda row: f"{row['bare_ms']:.1f}{'' if row.get('steps_ms') else '*'}"),
        _beside(here, lambda row: _three(_mfu_ratio(row))),
        _beside(here, lambda row: _three(row["peak_ratio"])),
        _least(here, "operator_share"),
        _least(here, "line_share"),
    ]


def _mfu_ratio(row: Row) -> float | None:
    return row["mfu"] / row["expected_mfu"] if row["mfu"] else None


def _three(ratio: float | None) -> str:
    return "not known" if ratio is None else f"{ratio:.3f}"


def _beside(here: Sequence[Row | None], words: Callable[[Row], str]) -> str:
    return " / ".join("-" if row is None else words(row) for row in here).replace("*", "\\*")


def _least(here: Sequence[Row | None], name: str) -> str:
    known = [row[name] for row in here if row and row.get(name) is not None]
    return f"{min(known):.1%}" if known else "-"


def _worst(rows: Sequence[Row]) -> list[str]:
    """MFU only of rows with times of their own steps."""
    own = [row for row in rows if row.get("steps_ms")]
    figures = {
        "MFU": [_mfu_ratio(row) for row in own],
        "FLOPs": [row["flops_ratio"] for row in rows],
        "parts": [row["parts_ratio"] for row in rows],
        "peak": [row["peak_ratio"] for row in own],
        "reserved": [row["reserved_ratio"] for row in rows],
    }
    known = {name: [one for one in values if one] for name, values in figures.items()}
    lines = [f"{len(rows)} rows, {len(own)} with times of their own steps"]
    lines += [
        f"{name}: {min(values):.4f} to {max(values):.4f} in {len(values)}"
        for name, values in known.items()
        if values
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
