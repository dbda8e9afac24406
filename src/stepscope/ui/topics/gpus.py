"""A step on many GPUs in words and as JSON, and the file of prices."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.records.prediction import GpuComparison, GpuPrediction
from stepscope.text.figures import factor, interval, milliseconds, percent, significant
from stepscope.trace.files import read_whole
from stepscope.ui.topics.section import Column, Table
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


def gpus_answer(comparison: GpuComparison) -> Answer:
    now = f"the step takes {milliseconds(comparison.baseline_ms)} on {comparison.source}"
    usable = [row for row in comparison.gpus if row.step_ms is not None and row.fits is not False]
    others = [row for row in usable if row.gpu != comparison.source_gpu]
    if not others:
        return Answer(
            verdict="no other GPU in the table can run this step unchanged",
            why=now,
            next="a smaller batch may fit: see `stepscope whatif --set batch=x0.5`",
        )
    best = others[0]
    verdict = f"no GPU in the table would run this step faster than {comparison.source}"
    if (speedup := best.speedup or 1.0) >= _CLEAR:
        step = f"{milliseconds(best.step_ms or 0.0)} ({_interval(best)})"
        verdict = f"{best.gpu} would run this step {factor(speedup)} times as fast: {step}"
    why = f"{now}. It is GPU-bound on every GPU in the table"
    if bound := [row.gpu for row in others if row.decides == "host"]:
        names = ", ".join(bound[:3]) + (f" and {len(bound) - 3} more" if len(bound) > 3 else "")
        why = f"{now}. On {names} it would be host-bound, so a faster GPU would sit idle"
    following = (
        "run `stepscope calibrate` on that GPU and pass its file as gpu=FILE: this halves the "
        "interval"
    )
    if any(row.samples_per_money is not None for row in others):
        cheapest = max(others, key=lambda row: row.samples_per_money or 0.0)
        following = f"{cheapest.gpu} gives the most {work_word(comparison)} for the money"
    return Answer(verdict=verdict, why=why, next=following)


def _interval(row: GpuPrediction) -> str:
    return interval(row.low_ms or 0.0, row.high_ms or 0.0)


def work_word(comparison: GpuComparison) -> str:
    return "samples" if comparison.counts_samples else "steps"


def fits_word(row: GpuPrediction) -> str:
    """Whether the step fits, and what would."""
    if row.fits is None:
        return "?"
    if row.fits:
        return "yes"
    return f"no, batch {row.largest_batch}" if row.largest_batch else "no"


def gpu_table(comparison: GpuComparison) -> Table[GpuPrediction]:
    """The step on each GPU; of one whose step is not known only whether it fits."""

    def column(
        name: str, words: Callable[[GpuPrediction], str], unknown: str = ""
    ) -> Column[GpuPrediction]:
        return Column(name, lambda row: unknown if row.step_ms is None else words(row), name)

    def per_second(row: GpuPrediction) -> str:
        steps = 1e3 / (row.step_ms or 1.0)
        return significant((row.samples_per_s if comparison.counts_samples else steps) or 0.0)

    def name(row: GpuPrediction) -> str:
        return f"{row.gpu} (now)" if row.gpu == comparison.source_gpu else row.gpu

    work = work_word(comparison)
    columns: list[Column[GpuPrediction]] = [
        Column("GPU", name, "GPU", lambda row: row.gpu),
        column(">step", lambda row: milliseconds(row.step_ms or 0.0), "-"),
        column(">95%", _interval),
        column(">speed", lambda row: f"{factor(row.speedup or 0.0)}x"),
        column(f">{work}/s", per_second),
        Column(
            "bottleneck",
            lambda row: BOUND[row.decides] if row.decides else "",
            "bottleneck",
            lambda row: str(row.decides),
        ),
        Column("fits", fits_word, "fits"),
    ]
    if any(row.price for row in comparison.gpus):
        columns.append(
            Column(
                f">{work} per money",
                lambda row: significant(row.samples_per_money) if row.samples_per_money else "",
            )
        )
    return Table(title="the step", columns=columns, rows=comparison.gpus)


def gpus_notes(comparison: GpuComparison) -> list[str]:
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
