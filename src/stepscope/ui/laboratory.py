"""The collectives laboratory for every surface: sentences, rows, JSON."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.records.figures import binary_size, byte_rate, duration, factor, percent
from stepscope.records.words import counted
from stepscope.ui.answer import Answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.laboratory import AlgorithmCrossover, AlgorithmTimes, LaboratoryReport

SCHEMA = 1
_NOISY = 0.2  # passes of one step that differ by more: other programs used the machine
_NEAR = 2.0  # times: a crossover predicted better than that is right


def algorithm_name(name: str) -> str:
    """halving_doubling as people write it."""
    return name.replace("_", "-")


def kinds_of(report: LaboratoryReport) -> list[str]:
    return list(dict.fromkeys(times.kind for times in report.algorithms))


def of_kind(report: LaboratoryReport, kind: str) -> list[AlgorithmTimes]:
    return [times for times in report.algorithms if times.kind == kind]


def laboratory_answer(report: LaboratoryReport) -> Answer:
    return Answer(verdict=_verdict(report), why=_why(report), next=_next(report))


def _verdict(report: LaboratoryReport) -> str:
    """The fastest algorithm for small and for large vectors."""
    kind = kinds_of(report)[0]
    ours = [times for times in of_kind(report, kind) if times.formula]
    ends = ", ".join(
        f"{_fastest(ours, at)} at {binary_size(ours[0].sizes[at].size_bytes)}" for at in (0, -1)
    )
    return f"{kind} over {counted(report.world_size, 'rank')} ({report.backend}): fastest {ends}"


def _fastest(algorithms: list[AlgorithmTimes], at: int) -> str:
    """The fastest at a size; "about" if passes of another one were as fast."""
    best = min(algorithms, key=lambda times: times.sizes[at].time_ns)
    rivals = [
        times
        for times in algorithms
        if times is not best and times.sizes[at].low_ns <= best.sizes[at].high_ns
    ]
    name = algorithm_name(best.algorithm)
    return f"{name} (not clearly)" if rivals else name


def _why(report: LaboratoryReport) -> str:
    link = report.link
    errors = [times.error for times in report.algorithms if times.error is not None]
    beta = link.beta_ns_per_byte
    rate = f"and then moves {_rate(beta)}" if beta else "at all sizes"
    return (
        f"one step takes {duration(link.alpha_ns)} {rate}. With these rates the formulas are "
        f"{percent(median(errors))} off (median of {len(errors)}), {percent(max(errors))} at "
        "worst"
    )


def _next(report: LaboratoryReport) -> str:
    if report.link.noise > _NOISY:
        return (
            f"passes of a single step differ by {percent(report.link.noise)}. Other programs "
            "use the machine: measure again when it is idle"
        )
    beaten = _slowest_backend(report)
    if beaten:
        return beaten
    return "compare for other numbers of ranks: stepscope calibrate --compare 25MB --world 64"


def _slowest_backend(report: LaboratoryReport) -> str | None:
    """Where a textbook algorithm beats the backend's own most clearly."""
    best: tuple[float, str] | None = None
    for kind in kinds_of(report):
        times = {one.algorithm: one for one in of_kind(report, kind)}
        backend = times.pop(report.backend, None)
        for one in times.values() if backend else ():
            for ours, theirs in zip(one.sizes, backend.sizes, strict=True):  # type: ignore[union-attr]
                # Clear of both spreads.
                gain = theirs.low_ns / max(1, ours.high_ns)
                words = (
                    f"{report.backend}'s own {kind} of {binary_size(ours.size_bytes)} takes "
                    f"{factor(theirs.time_ns / ours.time_ns)} times as long as "
                    f"{algorithm_name(one.algorithm)}. Try other settings of {report.backend}"
                )
                if gain > 1 and (best is None or gain > best[0]):
                    best = (gain, words)
    return best[1] if best else None


def crossover_words(crossover: AlgorithmCrossover) -> tuple[str, str, str]:
    """Which two, the predicted size, the measured one."""
    pair = f"{algorithm_name(crossover.below)} → {algorithm_name(crossover.above)}"
    measured = crossover.measured_bytes
    seen = binary_size(measured) if measured else "not seen"
    return pair, binary_size(crossover.predicted_bytes), seen


def crossovers_right(crossovers: Sequence[AlgorithmCrossover]) -> int:
    """How many were predicted within a factor of two."""
    return sum(
        one.measured_bytes is not None
        and 1 / _NEAR <= one.predicted_bytes / one.measured_bytes <= _NEAR
        for one in crossovers
    )


def link_rows(report: LaboratoryReport) -> list[tuple[str, str]]:
    """What a step costs, with the letters of the formulas."""
    link = report.link
    rows = [
        ("α, one step", duration(link.alpha_ns)),
        ("1/β, all ranks send", _rate(link.beta_ns_per_byte)),
        ("1/γ, adding", _rate(link.gamma_ns_per_byte)),
        ("each further message", duration(link.message_ns)),
        ("a call, apart from its steps", duration(link.start_ns)),
    ]
    if report.world_size > 2:
        rows.insert(2, ("1/β, one pair alone", _rate(link.pair[-1].beta_ns_per_byte)))
    if link.inside:
        rows.insert(2, ("1/β, inside a host", _rate(link.inside[-1].beta_ns_per_byte)))
    return rows


def _rate(ns_per_byte: float) -> str:
    """Too fast to see is not a rate of zero."""
    return byte_rate(1e9 / ns_per_byte) if ns_per_byte else "not seen"


def laboratory_json(report: LaboratoryReport) -> dict[str, Any]:
    """`calibrate --algorithms --json`, schema 1 (docs/reference/json.md)."""
    link = {
        "alpha_ns": report.link.alpha_ns,
        "beta_ns_per_byte": report.link.beta_ns_per_byte,
        **msgspec.to_builtins(report.link),
    }
    return {
        "schema": SCHEMA,
        **msgspec.to_builtins(laboratory_answer(report)),
        "laboratory": msgspec.to_builtins(report) | {"link": link},
    }
