"""Promised against measured: rows of library_promises.py as a table, its summary and the misses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

BEGIN, END = "<!-- library promises: begin -->", "<!-- library promises: end -->"
WAYS = ("modelled", "probed")
_CLEAR = 0.05  # a change of the step whose sign counts
Row = dict[str, Any]


def rows_of(results: Mapping[str, Any]) -> Iterator[Row]:
    """One row for each change of a model that was promised and measured."""
    for model, result in results.items():
        measured = result.get("measured", {})
        for change, outcome in measured.items():
            if "step_ms" not in outcome or not change or change == "again":
                continue
            for way in WAYS:
                promise = result["promises"].get(way, {}).get(change) or {}
                if promise.get("predicted_ms") is None or promise.get("refused"):
                    continue
                base = outcome.get("base_ms") or measured.get("", {}).get("step_ms")
                yield _row(model, change, way, promise, outcome, base)


def _row(
    model: str, change: str, way: str, promise: Row, outcome: Row, base_ms: float | None
) -> Row:
    """A promise is about a step beside the unchanged one: what makes both slower, such as a host
    that was quicker yesterday, is no error of it. Older results have no unchanged step beside."""
    step, peak = outcome["step_ms"], outcome.get("peak_bytes")
    promised_peak = promise.get("peak_bytes")
    moved = math.log(step / base_ms) if base_ms else 0.0
    expected = math.log(promise["predicted_ms"] / promise["baseline_ms"])
    beside = outcome.get("base_ms")
    pace = beside / promise["baseline_ms"] if beside else 1.0
    promised = {name: promise[name] * pace for name in ("predicted_ms", "low_ms", "high_ms")}
    return {
        "model": model,
        "change": change,
        "way": way,
        "measured_ms": step,
        "pace": pace,
        **promised,
        "error": promised["predicted_ms"] / step - 1,
        "inside": promised["low_ms"] <= step <= promised["high_ms"],
        "sign": None if abs(moved) < _CLEAR else moved * expected > 0,
        "peak_error": promised_peak / peak - 1 if promised_peak and peak else None,
        "peak_bytes": peak,
        "promised_peak_bytes": promised_peak,
    }


def summary_of(rows: list[Row]) -> Row | None:
    if not rows:
        return None
    errors = [abs(row["error"]) for row in rows]
    peaks = [abs(row["peak_error"]) for row in rows if row["peak_error"] is not None]
    signs = [row["sign"] for row in rows if row["sign"] is not None]
    return {
        "cases": len(rows),
        "mean": sum(errors) / len(errors),
        "worst": max(errors),
        "inside": sum(row["inside"] for row in rows) / len(rows),
        "sign": sum(signs) / len(signs) if signs else None,
        "peaks": len(peaks),
        "peak_mean": sum(peaks) / len(peaks) if peaks else None,
        "peak_worst": max(peaks, default=None),
    }


def table_lines(results: Mapping[str, Any]) -> list[str]:
    rows = list(rows_of(results))
    lines = [
        "| | cases | mean | worst | inside 95% | sign right | peak: mean | worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, label in zip(WAYS, ("modelled", "with `probe`"), strict=True):
        summary = summary_of([row for row in rows if row["way"] == way])
        if summary:
            names = ("mean", "worst", "inside", "sign", "peak_mean", "peak_worst")
            figures = " | ".join(_percent(summary[name]) for name in names)
            lines.append(f"| {label} | {summary['cases']} | {figures} |")
    lines += [
        "",
        "| model | change | measured | modelled | probed | peak |",
        "|---|---|---|---|---|---|",
    ]
    by_case: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault((row["model"], row["change"]), {})[row["way"]] = row
    for (model, change), ways in by_case.items():
        first = next(iter(ways.values()))
        promised = " | ".join(_promise_words(ways.get(way)) for way in WAYS)
        peak = _percent(first["peak_error"], signed=True)
        lines.append(
            f"| {model} | {change} | {first['measured_ms']:.3g} ms | {promised} | {peak} |"
        )
    return [*lines, *_failures(results)]


def _promise_words(row: Row | None) -> str:
    if row is None:
        return ""
    miss = "" if row["inside"] else ", outside"
    return f"{row['predicted_ms']:.3g} ({_percent(row['error'], signed=True)}{miss})"


def _failures(results: Mapping[str, Any]) -> Iterator[str]:
    for model, result in results.items():
        for what in ("failure", "probe_failure"):
            if result.get(what):
                yield f"\n{model}: {what.replace('_', ' ')}: {result[what].strip()[-160:]}"


def _percent(share: float | None, *, signed: bool = False) -> str:
    if share is None:
        return ""
    return f"{100 * share:+.0f}%" if signed else f"{100 * share:.1f}%"


def print_table(results: Mapping[str, Any]) -> None:
    print("\n".join(table_lines(results)))


def write_docs(page: Path, results: Mapping[str, Any]) -> None:
    """Between the two marks of the page."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page}: expected {BEGIN} and {END}")
    page.write_text("\n".join((before + BEGIN, *table_lines(results), END + after)))
