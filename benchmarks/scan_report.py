"""The scan table in Markdown, and where the scan wins as a picture."""

from __future__ import annotations

import math
from typing import Any

Cell = dict[str, Any]
_SIDE, _LEFT, _TOP, _GAP, _TITLE = 46, 70, 40, 20, 50
_PANELS = 2  # in a row
_EVEN, _FASTER, _SLOWER = (240, 240, 236), (66, 170, 110), (222, 110, 90)
_ONLY_SCAN = "rgb(176,203,232)"  # cuDNN takes no more than 65535 steps
_LEGEND = (
    "Green: the scan is faster. Red: cuDNN is. Blue, only: cuDNN refuses more than 65535 steps. "
    "Dashed: not measured."
)


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


def gains(cells: list[Cell]) -> str:
    """A row for each batch and size: times as fast as cuDNN, backward and the whole step."""
    steps = sorted({cell["steps"] for cell in cells if backward_gain(cell) is not None})
    by_shape: dict[tuple[int, int], dict[int, str]] = {}
    for cell in cells:
        shape = by_shape.setdefault((cell["batch"], cell["size"]), {})
        backward, step = backward_gain(cell), step_gain(cell)
        if backward is not None and step is not None:
            shape[cell["steps"]] = f"{backward:.2g} / {step:.2g}"
    lines = ["| B | H | " + " | ".join(map(str, steps)) + " |", "|--:" * (len(steps) + 2) + "|"]
    for (batch, size), known in sorted(by_shape.items()):
        row = [str(batch), str(size), *(known.get(count, "-") for count in steps)]
        lines.append("| " + " | ".join(row) + " |")
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
    """Panels by batch, two in a row; steps across, sizes down; green where the scan's backward pass
    is faster, and in blue the steps that only the scan takes."""
    batches, sizes, steps = (
        sorted({one[name] for one in cells}) for name in ("batch", "size", "steps")
    )
    high = _TOP + _SIDE * len(sizes) + _GAP
    wide = _LEFT + _SIDE * len(steps) + _GAP
    rows = -(-len(batches) // _PANELS)
    width, height = wide * min(_PANELS, len(batches)), high * rows + _TITLE
    title = "Times as fast as cuDNN, backward through time; steps across, size of the state down"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="16" y="22" font-size="14" font-weight="bold">{title}</text>',
        f'<text x="16" y="42">{_LEGEND}</text>',
    ]
    for number, batch in enumerate(batches):
        mine = {(one["size"], one["steps"]): one for one in cells if one["batch"] == batch}
        x, y = wide * (number % _PANELS), high * (number // _PANELS) + _TITLE
        parts.append(f'<g transform="translate({x} {y})">')
        parts += _panel(f"batch {batch}", sizes, steps, mine)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


def _panel(
    title: str, sizes: list[int], steps: list[int], cells: dict[tuple[int, int], Cell]
) -> list[str]:
    parts = [f'<text x="{_LEFT}" y="{_TOP - 22}" font-weight="bold">{title}</text>']
    for column, count in enumerate(steps):
        x = _LEFT + _SIDE * (column + 0.5)
        parts.append(f'<text x="{x}" y="{_TOP - 6}" text-anchor="middle">{_short(count)}</text>')
    for row, size in enumerate(sizes):
        y = _TOP + _SIDE * (row + 0.5) + 4
        parts.append(f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">H = {size}</text>')
        for column, count in enumerate(steps):
            cell = cells.get((size, count))
            parts.append(_square(_LEFT + _SIDE * column, _TOP + _SIDE * row, cell))
    return parts


def _square(x: float, y: float, cell: Cell | None) -> str:
    if cell is None or not isinstance(cell["ms"].get("scan"), float):
        return (
            f'<rect x="{x + 0.5}" y="{y + 0.5}" width="{_SIDE - 3}" height="{_SIDE - 3}" rx="3" '
            'fill="none" stroke="#bbb" stroke-dasharray="3 3"/>'
        )
    gain = backward_gain(cell)
    colour, words = (_colour(gain), f"{gain:.2g}") if gain is not None else (_ONLY_SCAN, "only")
    middle = _SIDE / 2
    return (
        f'<rect x="{x}" y="{y}" width="{_SIDE - 2}" height="{_SIDE - 2}" rx="3" fill="{colour}"/>'
        f'<text x="{x + middle - 1}" y="{y + middle + 4}" text-anchor="middle">{words}</text>'
    )


def _colour(gain: float) -> str:
    """Grey at one; green to sixteen times as fast, red to sixteen times as slow."""
    strength = min(1.0, abs(math.log2(gain)) / 4) if gain > 0 else 1.0
    end = _FASTER if gain >= 1 else _SLOWER
    mixed = (round(a + (b - a) * strength) for a, b in zip(_EVEN, end, strict=True))
    return "rgb({},{},{})".format(*mixed)


def _short(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 else str(count)
