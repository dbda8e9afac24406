"""The scan table in Markdown, and where the scan wins as a picture."""

from __future__ import annotations

import math
from typing import Any

Cell = dict[str, Any]
_SIDE, _LEFT, _TOP, _GAP = 46, 70, 40, 28


def markdown(cells: list[Cell]) -> str:
    """A row for each shape: milliseconds, and times as fast as cuDNN."""
    lines = [
        "| B | H | T | cuDNN | scan | | cuDNN, fp16 | one by one | batched products | whole step |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in sorted(cells, key=lambda one: (one["batch"], one["size"], one["steps"])):
        ms = cell["ms"]
        numbers = [
            ms.get(name)
            for name in (
                "cudnn", "scan", "cudnn, fp16", "one by one, states", "batched products, states",
            )
        ]  # fmt: skip
        cudnn, scan, *others = map(_number, numbers)
        row = [cell["batch"], cell["size"], cell["steps"], cudnn, scan]
        row += [_times(backward_gain(cell)), *others, _times(step_gain(cell))]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def backward_gain(cell: Cell) -> float | None:
    return _ratio(cell, "cudnn", "scan")


def step_gain(cell: Cell) -> float | None:
    return _ratio(cell, "cudnn step", "scan step")


def _ratio(cell: Cell, over: str, under: str) -> float | None:
    first, second = cell["ms"].get(over), cell["ms"].get(under)
    if isinstance(first, float) and isinstance(second, float):
        return first / second
    return None


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "-"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}x"


def heat_map(cells: list[Cell]) -> str:
    """Panels by batch; steps across, sizes down; green where the scan's backward pass is faster."""
    batches, sizes, steps = (
        sorted({one[name] for one in cells}) for name in ("batch", "size", "steps")
    )
    panel = _TOP + _SIDE * len(sizes) + _GAP
    wide, high = _LEFT + _SIDE * len(steps) + 10, panel * len(batches) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
    ]
    for number, batch in enumerate(batches):
        top = number * panel + _TOP
        parts.append(f'<text x="{_LEFT}" y="{top - 22}" font-weight="bold">batch {batch}</text>')
        for column, count in enumerate(steps):
            x = _LEFT + _SIDE * (column + 0.5)
            parts.append(f'<text x="{x}" y="{top - 6}" text-anchor="middle">{_short(count)}</text>')
        for row, size in enumerate(sizes):
            y = top + _SIDE * (row + 0.5) + 4
            parts.append(f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">H = {size}</text>')
        mine = {
            (one["size"], one["steps"]): backward_gain(one)
            for one in cells
            if one["batch"] == batch
        }
        for (row, size), (column, count) in (
            (a, b) for a in enumerate(sizes) for b in enumerate(steps)
        ):
            gain = mine.get((size, count))
            if gain is not None:
                parts.append(_square(_LEFT + _SIDE * column, top + _SIDE * row, gain))
    return "\n".join([*parts, "</svg>"])


def _square(x: float, y: float, gain: float) -> str:
    middle = _SIDE / 2
    return (
        f'<rect x="{x}" y="{y}" width="{_SIDE - 2}" height="{_SIDE - 2}" fill="{_colour(gain)}"/>'
        f'<text x="{x + middle - 1}" y="{y + middle + 4}" text-anchor="middle">{gain:.2g}</text>'
    )


def _colour(gain: float) -> str:
    """White at one; green to sixteen times as fast, red to sixteen times as slow."""
    strength = min(1.0, abs(math.log2(gain)) / 4) if gain > 0 else 1.0
    rest = round(255 * (1 - 0.65 * strength))
    return f"rgb({rest},255,{rest})" if gain >= 1 else f"rgb(255,{rest},{rest})"


def _short(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 else str(count)
