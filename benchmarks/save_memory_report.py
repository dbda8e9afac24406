"""The table of save_memory_table.py in Markdown, and memory against time as a picture.

python benchmarks/save_memory_report.py rows.json [--svg save-memory.svg]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from save_memory_rows import saved_rows

Row = dict[str, Any]
_COLOURS = {
    "eager": "#444444",
    "ours 5%": "#0a7d4f",
    "ours 15%": "#12b76a",
    "ours 5%, heavy": "#4d7c0f",
    "ours 15%, heavy": "#84cc16",
    "ours, least": "#7ee0b5",
    "block checkpointing": "#c2410c",
    "selective checkpointing": "#f59e0b",
    "compile": "#1d4ed8",
    "compile, budget 0.5": "#60a5fa",
    "compile, budget 0.7": "#93c5fd",
}
_PANEL, _GAP, _LEFT, _TOP, _ACROSS = 210, 34, 50, 78, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="what save_memory_table.py --save wrote")
    parser.add_argument("--svg", type=Path, help="draw memory against time here")
    options = parser.parse_args()
    if not options.rows.exists():
        parser.error(f"{options.rows} is not there: save_memory_table.py --save writes it")
    rows = saved_rows(options.rows)
    print(markdown(rows))
    if options.svg:
        options.svg.write_text(pareto(rows))


def markdown(rows: list[Row]) -> str:
    """One row for each training and way; ratios are against eager."""
    lines = [
        "| training | way | saved | | peak | | step | | predicted peak | predicted step |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for model, ways in _by_model(rows).items():
        eager = ways.get("eager", {})
        for way, row in ways.items():
            lines.append(f"| {model} | {_label(way)} | {' | '.join(_cells(row, eager))} |")
    return "\n".join([*lines, *_twice(rows)])


def _cells(row: Row, eager: Row) -> list[str]:
    if "error" in row:
        return [row["error"].replace("|", "/")[:80], *[""] * 7]
    kept, peak = row.get("kept_bytes"), row.get("peak_bytes")
    return [
        _gigabytes(kept),
        _times(eager.get("kept_bytes"), kept),
        _gigabytes(peak),
        _times(eager.get("peak_bytes"), peak),
        f"{row['ms']:.4g} ms",
        _change(eager.get("ms"), row["ms"]),
        _beside(_gigabytes(row.get("promised_peak_bytes")), row.get("promised_peak_bytes"), peak),
        _beside(_ms(row.get("promised_ms")), row.get("promised_ms"), row["ms"]),
    ]


def _twice(rows: list[Row]) -> list[str]:
    found = [row for row in rows if "throughput_gain" in row]
    return [
        f"\n{row['model']}, batch {row['batch']} -> {2 * row['batch']} under a cap of "
        f"{_gigabytes(row['cap_bytes'])}: without {row['larger_without']}; with save_memory "
        f"{row['ms']} ms a step, {row['throughput_gain']} times the samples a second."
        for row in found
    ]


def _by_model(rows: list[Row]) -> dict[str, dict[str, Row]]:
    found = defaultdict[str, dict[str, Row]](dict)
    for row in rows:
        if "throughput_gain" not in row:
            found[row["model"]][row["way"]] = row
    return found


def _gigabytes(size_bytes: float | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 1e9:.3g} GB"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g} ms"


def _times(over: float | None, under: float | None) -> str:
    return f"{over / under:.2f}x" if over and under else "-"


def _change(before: float | None, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f}%" if before else "-"


def _beside(words: str, promised: float | None, measured: float | None) -> str:
    """With the error of the promise."""
    if not promised or not measured:
        return words
    return f"{words} ({100 * (promised / measured - 1):+.1f}%)"


def pareto(rows: list[Row]) -> str:
    """A panel for each training: step across, memory up, both against eager. Left and low is good.
    The memory is the step's peak; on a CPU, where torch keeps no account, what backward keeps."""
    panels = {
        model: ways for model, ways in _by_model(rows).items() if _memory(ways.get("eager", {}))
    }
    lines = -(-len(panels) // _ACROSS)
    wide = _LEFT + _ACROSS * (_PANEL + _GAP)
    high = _TOP + lines * (_PANEL + 2 * _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
        *_legend({way for ways in panels.values() for way in ways}),
    ]
    for number, (model, ways) in enumerate(panels.items()):
        x = _LEFT + (number % _ACROSS) * (_PANEL + _GAP)
        y = _TOP + (number // _ACROSS) * (_PANEL + 2 * _GAP)
        parts += _panel(model, ways, x, y)
    return "\n".join([*parts, "</svg>"])


def _memory(row: Row) -> int | None:
    return row.get("peak_bytes") or row.get("kept_bytes")


def _legend(shown: set[str]) -> list[str]:
    parts = []
    ways = [(way, colour) for way, colour in _COLOURS.items() if way in shown]
    for number, (way, colour) in enumerate(ways):
        x, y = _LEFT + number % 5 * 185, 16 + number // 5 * 18
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 10}" y="{y}">{_label(way)}</text>')
    return parts


def _label(way: str) -> str:
    """Return the name that readers see: rows call plans of save_memory "ours"."""
    return way.replace("ours", "plan")


def _panel(model: str, ways: dict[str, Row], x: float, y: float) -> list[str]:
    eager = ways["eager"]
    kind = "peak" if eager.get("peak_bytes") else "kept"
    points = {
        way: (row["ms"] / eager["ms"], memory / (_memory(eager) or 1))
        for way, row in ways.items()
        if (memory := _memory(row))
    }
    slowest = max(1.3, *(time for time, _ in points.values())) * 1.05
    fastest = min(0.9, *(time for time, _ in points.values())) * 0.97
    most = max(1.1, *(peak for _, peak in points.values()))

    def across(time: float) -> float:
        return round(x + _PANEL * (time - fastest) / (slowest - fastest), 1)

    def up(peak: float) -> float:
        return round(y + _PANEL * (1 - peak / most), 1)

    parts = [
        f'<text x="{x}" y="{y - 6}" font-weight="bold">{model}: {kind}</text>',
        f'<rect x="{x}" y="{y}" width="{_PANEL}" height="{_PANEL}" fill="#fafafa" stroke="#ccc"/>',
        f'<path d="M{x} {up(1)}H{x + _PANEL}M{across(1)} {y}V{y + _PANEL}" stroke="#bbb" '
        'stroke-dasharray="3 3" fill="none"/>',
        f'<text x="{x}" y="{y + _PANEL + 15}">{fastest:.2f}</text>',
        f'<text x="{x + _PANEL}" y="{y + _PANEL + 15}" text-anchor="end">{slowest:.2f} step</text>',
    ]
    parts += [
        f'<text x="{x - 4}" y="{up(share) + 4}" text-anchor="end" fill="#666">{share:g}</text>'
        for share in (0.25, 0.5, 0.75, 1.0)
    ]
    for way, (time, peak) in points.items():
        colour = _COLOURS.get(way, "#999")
        words = f"{_label(way)}: step {time:.3f}, {kind} {peak:.3f} of eager's"
        parts.append(
            f'<circle cx="{across(time)}" cy="{up(peak)}" r="6" fill="{colour}" stroke="#fff">'
            f"<title>{words}</title></circle>"
        )
    return parts


if __name__ == "__main__":
    main()
