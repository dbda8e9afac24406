"""Promises of bench_promises.py against what came of them, as Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from each_workload import spent_on
from library_table import NOTHING, print_table
from stepscope.text.figures import size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from each_workload import Result

PEAKS = {"promised_peak_bytes": "before the run", "explained_peak_bytes": "after"}
CLEAR = 0.05  # a measured change above this must have the promised sign


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One promise and what came of it."""

    name: str
    label: str
    base_ms: float  # measured beside the change
    captured_ms: float  # what the promise starts from
    promised_ms: float
    low_ms: float
    high_ms: float
    ms: float
    promised_peak_bytes: int | None
    peak_bytes: int | None

    @property
    def error(self) -> float:
        return self.promised_ms / self.ms - 1

    @property
    def change(self) -> float:
        return self.ms / self.base_ms - 1

    @property
    def promised_change(self) -> float:
        return self.promised_ms / self.captured_ms - 1

    @property
    def is_inside(self) -> bool:
        return self.low_ms <= self.ms <= self.high_ms

    @property
    def has_wrong_sign(self) -> bool:
        return abs(self.change) > CLEAR and (self.change > 0) != (self.promised_change > 0)

    @property
    def peak_error(self) -> float | None:
        if not self.peak_bytes or self.promised_peak_bytes is None:
            return None
        return self.promised_peak_bytes / self.peak_bytes - 1


def outcomes(results: dict[str, Result], *, probed: bool = False) -> Iterator[Outcome]:
    """Of every promise that was measured; `probed`: as promised with probed times, where it was."""
    for name, result in results.items():
        for label, row in result.get("changes", {}).items():
            promised = (row.get("probed") if probed else None) or row
            if row.get("ms") is not None and promised["promised_ms"] is not None:
                yield Outcome(
                    name=name,
                    label=label,
                    base_ms=row.get("base_ms", result["base"]["ms"]),
                    captured_ms=result["captured_ms"],
                    promised_ms=promised["promised_ms"],
                    low_ms=promised["low_ms"],
                    high_ms=promised["high_ms"],
                    ms=row["ms"],
                    promised_peak_bytes=promised["promised_peak_bytes"],
                    peak_bytes=row["peak_bytes"],
                )


def print_results(results: dict[str, Result]) -> None:
    """Markdown."""
    measured = list(outcomes(results))
    with_probe = {(one.name, one.label): one for one in outcomes(results, probed=True)}
    head = ("workload", "change", "base ms", "promised", "measured", "error", "with probe")
    print_table(
        (*head, "peak error", ""),
        [_row(one, with_probe[one.name, one.label]) for one in measured],
    )
    print()
    _print_facts(results)
    print()
    for sentence in summary(measured):
        print(f"- {sentence}")
    if any(with_probe[one.name, one.label] != one for one in measured):
        print("\nWith probed operator times:\n")
        for sentence in summary(list(with_probe.values())):
            print(f"- {sentence}")
        print()
    for sentence in (*_facts(results), *spent_on(results)):
        print(f"- {sentence}")
    for name, result in results.items():
        for label, row in result.get("changes", {}).items():
            if why := row.get("refused") or row.get("failure"):
                print(f"- {name}, {label}: not measured: {why}")
        if notes := result.get("promised_peak_notes"):
            print(f"- {name}, peak before the run: {'; '.join(notes)}")


def _print_facts(results: dict[str, Result]) -> None:
    """One row for each workload: the step, FLOPs and peaks, as known and as they were."""
    head = (
        "workload",
        "captured step",
        "measured",
        "error",
        "FLOPs' error",
        "peak before the run",
        "peak explained",
        "allocator's peak",
    )
    flops = dict(_flops_errors(results))
    peaks = {key: dict(_peak_errors(results, key)) for key in PEAKS}
    print_table(
        head,
        [
            (
                name,
                _known(result.get("captured_ms"), "{:.2f} ms"),
                _known(result.get("base", {}).get("ms"), "{:.2f} ms"),
                _known(_base_error(result), "{:+.1%}"),
                _known(flops.get(name), "{:+.1%}"),
                *(
                    f"{_bytes(result.get(key))} ({_known(peaks[key].get(name), '{:+.1%}')})"
                    for key in PEAKS
                ),
                _bytes(result.get("base", {}).get("peak_bytes")),
            )
            for name, result in results.items()
        ],
    )


def _known(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _bytes(value: int | None) -> str:
    return NOTHING if value is None else size(value)


def _base_error(result: Result) -> float | None:
    """Of the captured step, before any change."""
    measured, captured = result.get("base", {}).get("ms"), result.get("captured_ms")
    return captured / measured - 1 if measured and captured else None


def _row(one: Outcome, with_probe: Outcome) -> tuple[str, ...]:
    notes = [] if one.is_inside else ["outside its interval"]
    notes += ["**wrong sign**"] if one.has_wrong_sign else []
    return (
        one.name,
        one.label,
        f"{one.base_ms:.2f}",
        f"{one.promised_ms:.2f} ({one.low_ms:.2f} to {one.high_ms:.2f})",
        f"{one.ms:.2f}",
        f"{one.error:+.1%}",
        "-" if with_probe == one else f"{with_probe.promised_ms:.2f} ({with_probe.error:+.1%})",
        "-" if one.peak_error is None else f"{one.peak_error:+.1%}",
        ", ".join(notes),
    )


def summary(measured: Sequence[Outcome]) -> Iterator[str]:
    """The means in sentences, all together and by change."""
    if not measured:
        yield "nothing was measured"
        return
    for label in dict.fromkeys(("", *(one.label for one in measured))):
        chosen = [one for one in measured if label in ("", one.label)]
        if not chosen:
            continue
        errors = [abs(one.error) for one in chosen]
        inside = sum(one.is_inside for one in chosen)
        same = fmean(abs(one.base_ms / one.ms - 1) for one in chosen)
        yield (
            f"{label or 'all'}: mean error {fmean(errors):.1%}, worst {max(errors):.1%} "
            f"({len(chosen)} promises, {inside} inside their intervals; {same:.1%} if nothing had "
            "been promised to change)"
        )
    wrong = [f"{one.name} {one.label}" for one in measured if one.has_wrong_sign]
    clear = sum(abs(one.change) > CLEAR for one in measured)
    yield (
        f"sign wrong in {len(wrong)} of {clear} changes above {CLEAR:.0%}"
        f"{': ' + ', '.join(wrong) if wrong else ''}"
    )
    if peaks := [abs(one.peak_error) for one in measured if one.peak_error is not None]:
        yield f"promised peaks of memory: mean error {fmean(peaks):.1%}, worst {max(peaks):.1%}"


def _facts(results: dict[str, Result]) -> Iterator[str]:
    """FLOPs against torch's counter, and explained peaks against the allocator's."""
    yield from _worst("FLOPs against torch's counter", _flops_errors(results), within=0.01)
    steps = [(name, _base_error(result)) for name, result in results.items()]
    known = [(name, error) for name, error in steps if error is not None]
    yield from _worst("captured steps against measured ones", known, within=0.05)
    for key, when in PEAKS.items():
        what = f"peaks of memory known {when} against the allocator's"
        yield from _worst(what, _peak_errors(results, key), within=0.03)


def _flops_errors(results: dict[str, Result]) -> Iterator[tuple[str, float]]:
    for name, result in results.items():
        flops: dict[str, Any] = result.get("flops", {})
        if flops.get("torch") and flops.get("explained") is not None:
            yield name, flops["explained"] / flops["torch"] - 1


def _peak_errors(results: dict[str, Result], key: str) -> Iterator[tuple[str, float]]:
    for name, result in results.items():
        allocated = result.get("base", {}).get("peak_bytes")
        if allocated and result.get(key) is not None:
            yield name, result[key] / allocated - 1


def _worst(what: str, errors: Iterable[tuple[str, float]], within: float) -> Iterator[str]:
    known = list(errors)
    if known:
        name, worst = max(known, key=lambda one: abs(one[1]))
        near = sum(abs(error) <= within for _, error in known)
        yield f"{what}: {near} of {len(known)} within {within:.0%}, worst {name} ({worst:+.1%})"
