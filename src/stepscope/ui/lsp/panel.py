"""The answer to `stepscope/panel`: what a side panel draws of one script."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygls.uris import from_fs_path

from stepscope.ui.lsp.batch_now import batch_now
from stepscope.ui.lsp.program_text import qualified_name
from stepscope.ui.lsp.rebased_change import text_lines
from stepscope.ui.lsp.script_state import choose_costs, followed_lines

if TYPE_CHECKING:
    from stepscope.records.line_costs import BatchPoint, LineCost, LineCosts
    from stepscope.ui.lsp.measured_run import MeasuredRun
    from stepscope.ui.lsp.script_state import ScriptState, TextOf

_MOST_OPERATORS = 8
_MOST_CODE = 60  # characters of a line
_KEPT_IN = "activations"  # the category that lines keep bytes in
_ELSEWHERE = "not in your lines"

Block = dict[str, Any]


def panel_of(state: ScriptState, text_of: TextOf) -> dict[str, Any]:
    """Names and units are those of docs/reference/cli/lsp.md; None means not known."""
    shown = choose_costs(state, text_of)
    measured = state.measured
    costs = shown.costs if shown is not None else None
    is_estimate = costs is not None and costs.kind == "estimated"
    interval = measured is not None and not is_estimate
    batch = _batch(state, text_of)
    step_ms = costs.step_ms if costs is not None else None
    return {
        "state": shown.trust if shown is not None else "none",
        "verdict": costs.verdict if costs is not None else None,
        "stepMs": step_ms,
        "lowMs": measured.low_ms if interval and measured else None,
        "highMs": measured.high_ms if interval and measured else None,
        "samplesPerSecond": _throughput(measured, costs, batch),
        "peakBytes": _peak(state, costs),
        "capacityBytes": measured.capacity_bytes if measured is not None else None,
        "batch": batch,
        "batchElsewhere": _elsewhere(measured) if batch is None else None,
        "time": _time_blocks(state, costs, text_of) if costs is not None else [],
        "memory": _memory_blocks(state, costs, text_of) if costs is not None else [],
        "gpus": _gpus(state),
        "report": measured.report if measured is not None else None,
        "runningSince": state.running_since,
        "error": state.error or state.estimate_failed,
    }


def _throughput(
    measured: MeasuredRun | None, costs: LineCosts | None, batch: Block | None
) -> float | None:
    """Of an edited script only if the number that sets its batch is known."""
    if measured is None or measured.batch is None or costs is None or costs.step_ms <= 0:
        return None
    samples = float(measured.batch)
    if costs.kind == "estimated":
        if batch is None or measured.batch_number is None:
            return None
        samples *= batch["value"] / measured.batch_number
    return samples / costs.step_ms * 1e3


def _peak(state: ScriptState, costs: LineCosts | None) -> int | None:
    if costs is not None and costs.peak_bytes is not None:
        return costs.peak_bytes
    if costs is None or costs.kind == "estimated" or state.measured is None:
        return None
    return state.measured.peak_bytes


def _gpus(state: ScriptState) -> list[dict[str, Any]]:
    """Those that the measured step was predicted on."""
    rows = state.measured.gpus if state.measured is not None else ()
    return [
        {
            "gpu": row.gpu,
            "stepMs": row.step_ms,
            "lowMs": row.low_ms,
            "highMs": row.high_ms,
            "fits": row.fits,
            "decides": row.decides,
        }
        for row in rows
        if row.step_ms is not None
    ]


def _batch(state: ScriptState, text_of: TextOf) -> dict[str, Any] | None:
    """None while the number cannot be found in the script as it is now."""
    text = text_of(state.script)
    measured = state.measured
    if text is None or measured is None:
        return None
    place = batch_now(measured.costs, state.script, text)
    if place is None:
        return None
    points = [_point(point) for point in measured.curve]
    return {"value": place.value, "line": place.line - 1, "points": points}


def _elsewhere(measured: MeasuredRun | None) -> dict[str, Any] | None:
    """The place of the number as it was when the run was read."""
    place = measured.batch_elsewhere if measured is not None else None
    if place is None:
        return None
    uri = from_fs_path(place.file)
    return {"uri": uri, "line": place.line - 1, "name": place.name, "value": place.value}


def _point(point: BatchPoint) -> dict[str, Any]:
    return {
        "batch": point.batch,
        "stepMs": point.step_ms,
        "lowMs": point.low_ms,
        "highMs": point.high_ms,
        "samplesPerSecond": point.samples_per_second,
        "peakBytes": point.peak_bytes,
        "peakLowBytes": point.peak_low_bytes,
        "peakHighBytes": point.peak_high_bytes,
    }


def _time_blocks(state: ScriptState, costs: LineCosts, text_of: TextOf) -> list[Block]:
    """By function, then by line, then by operator; the rest of the step is a block of its own."""
    step_ms = costs.step_ms or 1.0
    blocks = []
    for (file, function), lines in _by_function(costs).items():
        children = [
            _line_block(line, costs, _now(state, costs, line, text_of), step_ms) for line in lines
        ]
        ms = sum(line.total_ms for line in lines)
        blocks.append(
            _block(_name(file, function), "ms", ms, ms / step_ms, _first_place(children), children)
        )
    blocks.sort(key=lambda block: -block["ms"])
    if costs.other_ms > 0:
        share = costs.other_ms / step_ms
        blocks.append(_block(_ELSEWHERE, "ms", costs.other_ms, share, None, []))
    return blocks


def _by_function(costs: LineCosts) -> dict[tuple[str, str], list[LineCost]]:
    functions: dict[tuple[str, str], list[LineCost]] = defaultdict(list)
    for line in costs.lines:
        full = qualified_name(costs.texts.get(line.file, ""), line.line)
        functions[line.file, full or line.function].append(line)
    return functions


def _line_block(line: LineCost, costs: LineCosts, now: int | None, step_ms: float) -> Block:
    children = [
        _block(one.name, "ms", one.ms, one.ms / step_ms, None, [])
        for one in line.operators[:_MOST_OPERATORS]
    ]
    place = (line.file, now) if now is not None else None
    name, ms = _line_name(line, costs, now), line.total_ms
    return _block(name, "ms", ms, ms / step_ms, place, children)


def _line_name(line: LineCost, costs: LineCosts, now: int | None) -> str:
    """`12  x = self.conv(x)`: its number today, its code as it was measured."""
    lines = text_lines(costs.texts.get(line.file, ""))
    code = " ".join(lines[line.line - 1].split()) if line.line <= len(lines) else ""
    short = code if len(code) <= _MOST_CODE else f"{code[: _MOST_CODE - 1]}…"
    return f"{now or line.line}  {short}".rstrip()


def _memory_blocks(state: ScriptState, costs: LineCosts, text_of: TextOf) -> list[Block]:
    """The peak by category; what is kept for backward, by line."""
    measured = state.measured
    if measured is None or not measured.peak_bytes:
        return []
    peak = measured.peak_bytes
    lines = [line for line in costs.lines if line.kept_bytes]
    kept = []
    for line in sorted(lines, key=lambda one: -(one.kept_bytes or 0)):
        now = _now(state, costs, line, text_of)
        place = (line.file, now) if now is not None else None
        size = line.kept_bytes or 0
        name = _line_name(line, costs, now)
        kept.append(_block(name, "bytes", size, size / peak, place, []))
    return [
        _block(name, "bytes", size, size / peak, None, kept if name == _KEPT_IN else [])
        for name, size in measured.memory.items()
        if size
    ]


def _now(state: ScriptState, costs: LineCosts, line: LineCost, text_of: TextOf) -> int | None:
    """The line's number today (from 1)."""
    file = Path(line.file)
    text = text_of(file)
    followed = followed_lines(state, costs, file, text) if text is not None else None
    if followed is None:
        return None
    return next((one.line for one in followed.lines if one.cost is line), None)


def _first_place(children: list[Block]) -> tuple[str, int] | None:
    places = [(child["line"], child["uri"]) for child in children if child["line"] is not None]
    return None if not places else (min(places)[1], min(places)[0] + 1)


def _name(file: str, function: str) -> str:
    return function if function and function != "<module>" else Path(file).name


def _block(
    name: str,
    unit: str,
    amount: float,
    share: float,
    place: tuple[str, int] | None,
    children: list[Block],
) -> Block:
    """`place` is a file or its address, and a line (from 1)."""
    uri = None
    if place is not None:
        uri = place[0] if "://" in place[0] else from_fs_path(place[0])
    return {
        "name": name,
        unit: amount,
        "share": share,
        "uri": uri,
        "line": place[1] - 1 if place is not None else None,
        "children": children,
    }
