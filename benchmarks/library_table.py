"""The library models as Markdown: tune's promise, its measured step, the best by hand beside it.

python benchmarks/library_table.py --tune tune.json [--tune more.json] [--hand hand.json]
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

import library_results
from library_hand import PLAIN, best

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Results = dict[str, Any]
NEAR = 1.03  # tune's step may be this much longer than the best by hand
NOTHING = "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", type=Path, action="append", required=True)
    parser.add_argument("--hand", type=Path, action="append", default=[])
    options = parser.parse_args()
    print_tables(library_results.merged(options.tune), library_results.merged(options.hand))


def print_tables(tuned: Results, by_hand: Results) -> None:
    """Models that were only tuned or only tried by hand have their row too."""
    names = [name for name in library_results.MODELS if name in tuned or name in by_hand]
    print_table(
        (
            "model",
            "baseline ms",
            "promised",
            "measured",
            "speed-up",
            "kept",
            "numbers",
            "control",
            "by hand ms",
            "best by hand",
            "tune / hand",
        ),
        [_row(name, tuned.get(name), by_hand.get(name)) for name in names],
    )
    answers = [result["answer"] for result in tuned.values() if result.get("answer")]
    print(f"\n{means(answers, tuned, by_hand)}\n")
    print_table(
        ("model", "remedy", "promised ms", "measured", "error", "numbers", "kept", "why"),
        [row for name in names for row in _alone_rows(name, (tuned.get(name) or {}).get("answer"))],
    )


def _row(name: str, tuned: Results | None, by_hand: Results | None) -> tuple[str, ...]:
    hand_cells = _hand_cells(tuned, by_hand)
    if tuned is None or tuned.get("answer") is None:
        why = "not tuned" if tuned is None else f"failed: {tuned['failure']}"
        return (name, *[NOTHING] * 4, why, NOTHING, NOTHING, *hand_cells)
    answer = tuned["answer"]
    combination = _combination(answer)
    ends = (answer.get("best_low_ms"), answer.get("best_high_ms"))
    return (
        name,
        _ms(answer["baseline_ms"]),
        _ms(tuned.get("promised_ms") or combination.get("predicted_ms")),
        _ms(answer["best_ms"], *ends),
        f"{answer['baseline_ms'] / answer['best_ms']:.2f}x",
        " + ".join(answer["kept"]) or "nothing",
        combination.get("parity") or NOTHING,
        answer.get("control") or NOTHING,
        *hand_cells,
    )


def _hand_cells(tuned: Results | None, by_hand: Results | None) -> tuple[str, str, str]:
    answer = (tuned or {}).get("answer")
    fastest = best(by_hand, _refused(answer)) if by_hand else None
    if fastest is None:
        return NOTHING, NOTHING, NOTHING
    words, ms = fastest
    return _ms(ms), words, f"{answer['best_ms'] / ms:.3f}" if answer else NOTHING


def _refused(answer: Results | None) -> set[str]:
    """Remedies that train something else here: a fair comparison by hand does without them."""
    trials = answer["trials"] if answer else ()
    return {
        trial["remedies"][0]
        for trial in trials
        if len(trial["remedies"]) == 1 and trial.get("parity") == "failed"
    }


def _combination(answer: Results) -> Results:
    """The trial of all that was kept."""
    kept = set(answer["kept"])
    return next((trial for trial in answer["trials"] if kept == set(trial["remedies"])), {})


def _alone_rows(name: str, answer: Results | None) -> Iterable[tuple[str, ...]]:
    for trial in answer["trials"] if answer else ():
        if len(trial["remedies"]) != 1:
            continue
        promised, measured = trial.get("predicted_ms"), trial.get("measured_ms")
        error = f"{promised / measured - 1:+.0%}" if promised and measured else NOTHING
        yield (
            name,
            trial["remedies"][0],
            _ms(promised),
            _ms(measured, trial.get("low_ms"), trial.get("high_ms")),
            error,
            trial.get("parity") or NOTHING,
            "yes" if trial["remedies"][0] in answer["kept"] else "no",
            trial.get("why") or "",
        )


def means(answers: Sequence[Results], tuned: Results, by_hand: Results) -> str:
    """The numbers below the table, one sentence each."""
    sentences = []
    if answers:
        gains = [answer["baseline_ms"] / answer["best_ms"] for answer in answers]
        sentences.append(
            f"Geometric mean speed-up of tune over {len(gains)} models: {geometric(gains):.2f}x."
        )
    errors = [
        abs(trial["predicted_ms"] / trial["measured_ms"] - 1)
        for answer in answers
        for trial in answer["trials"]
        if len(trial["remedies"]) == 1 and trial.get("predicted_ms") and trial.get("measured_ms")
    ]
    if errors:
        sentences.append(
            f"Promised steps of single remedies were {fmean(errors):.0%} off on average, "
            f"{max(errors):.0%} at worst ({len(errors)} promises)."
        )
    hand_gains = {
        name: result["combinations"][PLAIN.words]["ms"] / fastest[1]
        for name, result in by_hand.items()
        if (fastest := best(result)) and "ms" in result["combinations"].get(PLAIN.words, {})
    }
    if hand_gains:
        sentences.append(
            f"By hand, {len(hand_gains)} models: {geometric(list(hand_gains.values())):.2f}x."
        )
    ratios = {
        name: result["answer"]["best_ms"] / fastest[1]
        for name, result in tuned.items()
        if (answer := result.get("answer"))
        and name in by_hand
        and (fastest := best(by_hand[name], _refused(answer)))
    }
    if ratios:
        slow = [name for name, ratio in ratios.items() if ratio > NEAR]
        near = f"{len(ratios) - len(slow)} of {len(ratios)} within {NEAR - 1:.0%} or faster"
        misses = f"; slower: {', '.join(slow)}" if slow else ""
        sentences.append(
            f"Tune's step over the best by hand: {geometric(list(ratios.values())):.3f} "
            f"(geometric mean), {near}{misses}."
        )
    return "\n".join(sentences)


def geometric(values: Sequence[float]) -> float:
    return math.exp(fmean(math.log(value) for value in values))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"| {' | '.join(head)} |")
    print(f"|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")


def _ms(value: float | None, low: float | None = None, high: float | None = None) -> str:
    if value is None:
        return NOTHING
    ends = "" if low is None or high is None else f" ({low:.1f} to {high:.1f})"
    return f"{value:.1f}{ends}"


if __name__ == "__main__":
    main()
