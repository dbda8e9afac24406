"""The saved answers of field_answers.py as one Markdown table and a summary.

Whether a headline is true, and whether `next` helps, is judged by hand from the measured changes:
field_truth.toml has a table for each script, with `truth`, `next` and `how`.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from field_answers import Question

TRUTH = Path(__file__).with_name("field_truth.toml")
AS_IT_IS, TWICE = "as it is", "twice the batch"
_NOT = "not checked"
_SAME = 0.03  # steps this close count as equally long

_HEAD = (
    "| script | kind | verdict | next | twice the batch: samples/s, said -> measured | inside |"
    " loader workers: step, said / measured | other changes: step | true? | next helps? |"
)


def table(answers: Sequence[tuple[Question, dict[str, Any]]]) -> str:
    """Every script with saved answers, then what they add up to."""
    truth = tomllib.loads(TRUTH.read_text()) if TRUTH.exists() else {}
    complete = [(question, saved) for question, saved in answers if saved.get("explained")]
    lines = [_HEAD, "|" + "---|" * (_HEAD.count("|") - 1)]
    lines += [_row(question, saved, truth.get(question.name, {})) for question, saved in complete]
    judged = [truth.get(question.name, {}) for question, _ in complete]
    saved = [saved for _, saved in complete]
    return "\n".join([*lines, "", *_summary(saved, judged)])


def _row(question: Question, saved: dict[str, Any], judged: dict[str, str]) -> str:
    said = saved["explained"]
    batch = batch_gain(saved)
    others = [name for name in saved.get("measured", {}) if name in question.tries]
    cells = (
        question.name,
        question.kind,
        said.get("verdict") or "-",
        _text(said.get("next")),
        batch["words"] if batch else "-",
        {True: "yes", False: "no", None: "-"}[batch["inside"] if batch else None],
        "; ".join(
            f"{row['workers']}: {_factor(row['said'])} / {_factor(row['measured'])}"
            for row in loader_rows(saved)
        )
        or "-",
        "; ".join(f"{name}: {_factor(ratio(saved, name))}" for name in others) or "-",
        judged.get("truth", ""),
        judged.get("next", ""),
    )
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def batch_gain(saved: dict[str, Any]) -> dict[str, Any] | None:
    """Samples per second with twice the batch, against one; None if not measured."""
    measured = ratio(saved, TWICE, "within_ms")  # a step's samples: no pauses between epochs
    if measured is None:
        return None
    said = _said(saved, "batch=x2")
    if said is None:
        return {"words": f"not said -> {2 / measured:.2f}x", "inside": None}
    step, low, high = said
    return {
        "words": f"{2 / step:.2f}x ({2 / high:.2f} to {2 / low:.2f}) -> {2 / measured:.2f}x",
        "inside": low <= measured <= high,
    }


def loader_rows(saved: dict[str, Any]) -> list[dict[str, Any]]:
    """The step with each number of workers against the step as it is: said and measured."""
    rows = []
    for number in (0, 1, 2, 4):
        measured = ratio(saved, f"{number} loader workers")
        if measured is not None:
            said = _said(saved, f"loader-workers={number}")
            step, low, high = said or (None, 0.0, math.inf)
            row = {"workers": number, "said": step, "low": low, "high": high}
            rows.append({**row, "measured": measured})
    return rows


def ratio(saved: dict[str, Any], name: str, of: str = "mean_ms") -> float | None:
    """The mean step with a change, as a factor of the mean step without it."""
    measured = saved.get("measured", {})
    if not measured.get(AS_IT_IS) or not measured.get(name):
        return None
    return _step(measured[name], of) / _step(measured[AS_IT_IS], of)


def _step(results: Sequence[dict[str, Any]], of: str) -> float:
    return median(result[of] for result in results)


def _said(saved: dict[str, Any], change: str) -> tuple[float, float, float] | None:
    """The predicted step and its interval, as factors of the step that the prediction is for."""
    answer = saved["explained"].get("whatif", {}).get(change) or {}
    if not answer.get("predicted_ms") or not answer.get("baseline_ms"):
        return None
    base, step = answer["baseline_ms"], answer["predicted_ms"]
    low, high = answer.get("low_ms") or step, answer.get("high_ms") or step
    return step / base, low / base, high / base


def _summary(saved: Sequence[dict[str, Any]], judged: Sequence[dict[str, str]]) -> list[str]:
    inside = [gain["inside"] for one in saved if (gain := batch_gain(one))]
    answered = [value for value in inside if value is not None]
    rows = [row for one in saved for row in loader_rows(one) if row["said"] is not None]
    signs = [_sign(row["said"]) * _sign(row["measured"]) >= 0 for row in rows]
    errors = [abs(row["said"] / row["measured"] - 1) for row in rows]
    sure = [
        (row, sign)
        for row, sign in zip(rows, signs, strict=True)
        if row["low"] > 1 or row["high"] < 1
    ]
    counts = {
        kind: [row[kind] for row in judged if row.get(kind, _NOT) != _NOT]
        for kind in ("truth", "next")
    }
    return [
        f"- {len(saved)} scripts",
        f"- twice the batch: {sum(answered)} of {len(answered)} inside the interval,"
        f" {inside.count(None)} not answered",
        f"- loader workers: {sum(signs)} of {len(signs)} signs right,"
        f" {sum(sign for _, sign in sure)} of {len(sure)} where the interval is on one side"
        + (f", {fmean(errors):.0%} mean error" if errors else ""),
        f"- headlines judged: {len(counts['truth'])}, true: {_yes(counts['truth'])}",
        f"- `next` tried: {len(counts['next'])}, better or said as may: {_yes(counts['next'])}",
    ]


def _sign(factor: float) -> int:
    """-1 for a shorter step, 1 for a longer one, 0 for about the same."""
    return 0 if abs(factor - 1) <= _SAME else 1 if factor > 1 else -1


def _yes(words: Sequence[str]) -> int:
    return sum(word.startswith(("yes", "said as may")) for word in words)


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _text(value: object) -> str:
    return str(value) if value else "-"
