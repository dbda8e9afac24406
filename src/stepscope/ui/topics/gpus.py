"""A step on many GPUs in words and as JSON, and the file of prices."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.records.prediction import GpuComparison, GpuPrediction
from stepscope.text.figures import factor, interval, milliseconds, percent, significant
from stepscope.trace.files import read_whole
from stepscope.ui.topics.whatif import BOUND
from stepscope.ui.words import Answer

SCHEMA = 1
_CLEAR = 1.02  # a step has to be this many times shorter to be called faster


def read_prices(path: Path) -> dict[str, float]:
    """GPU -> price per hour, from a JSON object or from lines of `gpu,price`."""
    from stepscope.predict.other_gpu.gpu import find_gpu

    text = read_whole(path)
    if text.lstrip()[:1] == b"{":
        try:
            named = msgspec.json.decode(text, type=dict[str, float])
        except msgspec.DecodeError as error:
            raise UnreadableInputError(
                f"{path} is not a JSON object of GPU and price per hour: {error}"
            ) from None
    else:
        named = dict(_price_lines(path, text.decode("utf-8", "replace")))
    if not named:
        raise UnreadableInputError(f"{path} has no prices. Write one line per GPU, such as L4,0.70")
    prices = {}
    for name, price in named.items():
        if not price > 0 or not math.isfinite(price):
            raise UsageError(f"{path}: {name} costs {price}. Give a price per hour above 0")
        try:
            prices[find_gpu(name).name] = price
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
    return prices


def _price_lines(path: Path, text: str) -> Iterator[tuple[str, float]]:
    for number, cells in enumerate(csv.reader(io.StringIO(text)), 1):
        if not cells or cells[0].startswith("#") or cells[0].strip().lower() == "gpu":
            continue
        try:
            name, price = cells
            yield name.strip(), float(price)
        except ValueError:
            raise UnreadableInputError(
                f"{path}, line {number}: write a GPU and its price per hour, such as L4,0.70"
            ) from None


def comparison_json(comparison: GpuComparison) -> dict[str, Any]:
    """As docs/reference/json.md describes it."""
    body = msgspec.to_builtins(comparison)
    for row in body["gpus"]:
        row["why"] = row["why"] or None
    return {"schema": SCHEMA, **body}


def answer(comparison: GpuComparison) -> Answer:
    usable = [row for row in comparison.gpus if row.step_ms is not None and row.fits is not False]
    others = [row for row in usable if row.gpu != comparison.source_gpu]
    if not others:
        return Answer(
            verdict="no other GPU in the table can run this step unchanged",
            why=f"the step takes {milliseconds(comparison.baseline_ms)} on {comparison.source}",
            next="a smaller batch may fit: see `stepscope whatif --set batch=x0.5`",
        )
    return Answer(
        verdict=_verdict(comparison, others[0]),
        why=_why(comparison, others),
        next=_next(comparison, others),
    )


def _verdict(comparison: GpuComparison, best: GpuPrediction) -> str:
    speedup = best.speedup or 1.0
    if speedup < _CLEAR:
        return f"no GPU in the table would run this step faster than {comparison.source}"
    step = f"{milliseconds(best.step_ms or 0.0)} ({_interval(best)})"
    return f"{best.gpu} would run this step {factor(speedup)} times as fast: {step}"


def _interval(row: GpuPrediction) -> str:
    return interval(row.low_ms or 0.0, row.high_ms or 0.0)


def _why(comparison: GpuComparison, rows: list[GpuPrediction]) -> str:
    bound = [row.gpu for row in rows if row.decides == "host"]
    now = f"the step takes {milliseconds(comparison.baseline_ms)} on {comparison.source}"
    if not bound:
        return f"{now}. It is GPU-bound on every GPU in the table"
    names = ", ".join(bound[:3]) + (f" and {len(bound) - 3} more" if len(bound) > 3 else "")
    return f"{now}. On {names} it would be host-bound, so a faster GPU would sit idle"


def _next(comparison: GpuComparison, rows: list[GpuPrediction]) -> str:
    priced = [row for row in rows if row.samples_per_money is not None]
    if priced:
        cheapest = max(priced, key=lambda row: row.samples_per_money or 0.0)
        return f"{cheapest.gpu} gives the most {work_word(comparison)} for the money"
    return (
        "run `stepscope calibrate` on that GPU and pass its file as gpu=FILE: this halves the "
        "interval"
    )


def work_word(comparison: GpuComparison) -> str:
    return "samples" if comparison.counts_samples else "steps"


def fits_word(row: GpuPrediction) -> str:
    """Whether the step fits, and what would."""
    if row.fits is None:
        return "?"
    if row.fits:
        return "yes"
    return f"no, batch {row.largest_batch}" if row.largest_batch else "no"


def columns(comparison: GpuComparison) -> list[str]:
    names = ["GPU", ">step", ">95%", ">speed", f">{work_word(comparison)}/s", "bottleneck", "fits"]
    if any(row.price for row in comparison.gpus):
        names.append(f">{work_word(comparison)} per money")
    return names


def cells(comparison: GpuComparison, row: GpuPrediction) -> list[str]:
    """One line of the table, in the order of `columns`."""
    name = f"{row.gpu} (now)" if row.gpu == comparison.source_gpu else row.gpu
    if row.step_ms is None:
        line = [name, "-", "", "", "", "", fits_word(row)]
    else:
        per_second = row.samples_per_s if comparison.counts_samples else 1e3 / row.step_ms
        line = [
            name,
            milliseconds(row.step_ms),
            _interval(row),
            f"{factor(row.speedup or 0.0)}x",
            significant(per_second or 0.0),
            BOUND[row.decides] if row.decides else "",
            fits_word(row),
        ]
    if any(one.price for one in comparison.gpus):
        line.append(significant(row.samples_per_money) if row.samples_per_money else "")
    return line


def notes(comparison: GpuComparison) -> list[str]:
    shares = [row.modelled_share for row in comparison.gpus if row.modelled_share]
    lines = [
        "CPU time is assumed to be the same on every GPU",
        "the column 95% is the prediction interval: 95% of measured steps should lie in it",
    ]
    if shares and max(shares) >= 0.01:
        lines.append(
            f"up to {percent(max(shares))} of the GPU's time is predicted from memory bandwidth "
            "alone"
        )
    reasons: dict[str, list[str]] = {}
    for row in comparison.gpus:
        if row.step_ms is None:
            reasons.setdefault(row.why.removeprefix(row.gpu).strip(), []).append(row.gpu)
    lines += [f"{', '.join(gpus)}: {reason}" for reason, gpus in reasons.items()]
    if comparison.peak_bytes is None:
        lines.append("peak memory was not captured, so it is unknown which GPUs have enough")
    return lines
