"""The fuse table in Markdown, and its plot.

Speed-ups are over one model at a time, eager: the median of all blocks that ran so beside the cells
of a training and precision. A single block depends on what the host did just then.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from fuse_processes import MPS, PROCESSES
from fuse_ways import SERIAL

Result = dict[str, Any]
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_WIDE, _HIGH, _LEFT, _TOP = 640, 360, 52, 16


def markdown(results: list[Result], device: str | None) -> str:
    """One table for each precision."""
    parts = []
    for dtype in _in_order(results, "dtype"):
        mine = [one for one in results if one["dtype"] == dtype]
        parts.append(_best_table(mine, f"{device}, {dtype}"))
        parts.append(_by_models_table(mine))
    return "\n\n".join(part for part in parts if part)


def _best_table(results: list[Result], title: str) -> str:
    lines = [
        f"**{title}**",
        "",
        "| | serial eager | best serial | vmap | streams | processes | with MPS | fused | B | "
        "speed-up | over best serial | MB a model |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    speed_ups = []
    for case in _in_order(results, "case"):
        mine = [one for one in results if one["case"] == case]
        eager = _control(results, mine[0])
        serial = _best(mine, *SERIAL)
        fused = _best(mine, *(one["way"] for one in mine if one["way"].startswith("fused")))
        others = (_ms(_best(mine, name)) for name in ("vmap", "streams", PROCESSES, MPS))
        row = [case, _number(eager), _number(_ms(serial)), *map(_number, others)]
        if fused is None:
            lines.append("| " + " | ".join([*row, *["-"] * 5]) + " |")
            continue
        speed_ups.append(_speed_up(results, fused))
        over = _ms(serial) / fused["ms_a_model_step"] if serial else None
        memory = fused["peak_bytes_a_model"]
        row += [_number(fused["ms_a_model_step"]), str(fused["models"])]
        row += [f"{speed_ups[-1]:.1f}x", "-" if over is None else f"{over:.1f}x"]
        row.append("-" if memory is None else f"{memory / 1e6:.0f}")
        lines.append("| " + " | ".join(row) + " |")
    if speed_ups:
        mean = math.exp(sum(map(math.log, speed_ups)) / len(speed_ups))
        lines += ["", f"Geometric mean of the speed-ups: {mean:.1f}x. Times are ms a model-step."]
    return "\n".join(lines)


def _by_models_table(results: list[Result]) -> str:
    """Speed-up by number of models."""
    fused = [one for one in results if one["way"].startswith("fused") and "error" not in one]
    counts = sorted({one["models"] for one in fused})
    if not counts:
        return ""
    lines = ["| | " + " | ".join(f"B = {count}" for count in counts) + " |"]
    lines.append("|---" + "|--:" * len(counts) + "|")
    for case in _in_order(fused, "case"):
        row = [case]
        for count in counts:
            mine = [one for one in fused if (one["case"], one["models"]) == (case, count)]
            best = _best(mine, *(one["way"] for one in mine))
            row.append("-" if best is None else f"{_speed_up(results, best):.1f}x")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def plot(results: list[Result]) -> str:
    """Speed-up against the number of models, both by powers of two."""
    fused = [one for one in results if one["way"].startswith("fused") and "error" not in one]
    most = max((_speed_up(results, one) for one in fused), default=1.0)
    top, right = math.ceil(math.log2(max(most, 2))), 5
    body = []
    for power in range(top + 1):
        y = _y(2**power, top)
        body.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDE - 130}" stroke="#ddd"/>')
        body.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{2**power}x</text>')
    for power in range(right + 1):
        x = _x(2**power, right)
        body.append(f'<text x="{x:.1f}" y="{_HIGH - 8}" text-anchor="middle">{2**power}</text>')
    body.append(f'<text x="{_WIDE - 122}" y="{_HIGH - 8}">fused models</text>')
    keys = [(case, dtype) for case in _in_order(fused, "case") for dtype in ("bf16", "fp32")]
    for place, (case, dtype) in enumerate(keys):
        best: dict[int, float] = {}
        for one in fused:
            if (one["case"], one["dtype"]) == (case, dtype):
                value = _speed_up(results, one)
                best[one["models"]] = max(value, best.get(one["models"], 0.0))
        if not best:
            continue
        points = [(_x(count, right), _y(value, top)) for count, value in sorted(best.items())]
        line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        colour, dash = _COLOURS[place // 2 % len(_COLOURS)], "" if dtype == "bf16" else "4 3"
        body.append(
            f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/>'
        )
        if dtype == "bf16":
            y = _TOP + 14 + 9 * place
            body.append(f'<text x="{_WIDE - 122}" y="{y}" fill="{colour}">{case}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" '
        'font-family="sans-serif" font-size="12"><title>Speed-up over one model at a time, by '
        f"number of models; dashed: fp32</title>{''.join(body)}</svg>\n"
    )


def _x(count: float, right: int) -> float:
    return _LEFT + math.log2(count) / right * (_WIDE - 130 - _LEFT)


def _y(value: float, top: int) -> float:
    return _HIGH - 28 - math.log2(max(value, 1.0)) / top * (_HIGH - 28 - _TOP)


def _speed_up(results: list[Result], cell: Result) -> float:
    return _control(results, cell) / _ms(cell)


def _control(results: list[Result], cell: Result) -> float:
    """One model at a time, eager, in ms."""
    like = [one for one in results if (one["case"], one["dtype"]) == (cell["case"], cell["dtype"])]
    return statistics.median(
        [one["control_ms"] for one in like if one.get("control_ms")] or [math.nan]
    )


def _best(results: list[Result], *ways: str) -> Result | None:
    mine = [one for one in results if one["way"] in ways and "error" not in one]
    return min(mine, key=_ms, default=None)


def _ms(result: Result | None) -> float:
    return math.nan if result is None else float(result["ms_a_model_step"])


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _in_order(results: list[Result], name: str) -> list[str]:
    return list(dict.fromkeys(one[name] for one in results))
