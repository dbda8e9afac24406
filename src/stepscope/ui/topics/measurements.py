"""Put what was measured on this machine into sentences, tables and JSON: a calibration, the
collectives laboratory, a probe's operator times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import to_builtins

from stepscope.predict.collective_times import fit_contention, fit_sweep
from stepscope.predict.operator_library import library_file
from stepscope.records.hardware import (
    AlgorithmCrossover,
    AlgorithmTimes,
    CollectiveFit,
    LaboratoryReport,
    OperatorTime,
    ProbeReport,
    Profile,
)
from stepscope.step.collectives import bus_factor
from stepscope.text.figures import (
    binary_size,
    byte_rate,
    duration,
    factor,
    flop_rate,
    percent,
    significant,
    size,
)
from stepscope.text.words import counted
from stepscope.ui.topics.section import Column, Table
from stepscope.ui.words import Answer, or_dash

if TYPE_CHECKING:
    from stepscope.predict.collective_times import AlgorithmComparison

SCHEMA = 1
_DISTURBED = 0.2  # passes that disagree by more than this: other programs used the machine
_POOR_FIT = 1.5  # times the noise between passes
_CEILINGS = {
    "copy_bytes_s": ("copy, read + write", byte_rate),
    "host_to_device_bytes_s": ("CPU to device, pinned", byte_rate),
    "device_to_host_bytes_s": ("device to CPU, pinned", byte_rate),
    "launch_ns": ("launch, CPU", duration),
    "launch_gap_ns": ("launch to launch, device", duration),
    "tiny_op_ns": ("tiny operator, CPU", duration),
}


class CollectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """One collective in one group, as tables print it; rates are at the largest size."""

    kind: str
    group: str
    group_size: int
    from_bytes: int
    to_bytes: int
    latency_ns: float
    algbw_gb_s: float
    busbw_gb_s: float
    segments: int
    passes: int
    held_out: float
    held_out_sizes: float
    noise: float


def fit_profile(raw: dict[str, Any]) -> Profile:
    """Fit what the ranks measured."""
    machine = raw["machine"]
    matmul = machine["matmul_flops"]
    single = {name: machine[name] for name in _CEILINGS if name in machine}
    refused = {f"{call['kind']}, {call['group']}": call["why"] for call in raw["not_offered"]}
    fitted = ("kind", "group", "group_size", "sizes_bytes", "passes_ns")
    return Profile(
        **{name: raw[name] for name in ("host", "device", "kind", "torch", "when_unix")},
        **{name: raw[name] for name in ("world_size", "backend")},
        threads=machine["threads"],
        matmul_flops={dtype: one["flops"] for dtype, one in matmul.items()},
        sustained_flops={
            dtype: one["sustained"] for dtype, one in matmul.items() if "sustained" in one
        },
        **{name: one["value"] for name, one in single.items()},
        spread={f"matmul {dtype}": one["spread"] for dtype, one in matmul.items()}
        | {name: one["spread"] for name, one in single.items()},
        not_offered=machine["not_offered"] | refused,
        fits=tuple(fit_sweep(**{name: sweep[name] for name in fitted}) for sweep in raw["sweeps"]),
        contention=fit_contention(raw["world_size"], raw.get("contention") or []),
        other_cores=machine.get("other_cores"),
        cores=machine.get("cores"),
        rounds=machine.get("rounds", 1),
        hosts=raw.get("hosts"),
    )


def collective_rows(profile: Profile) -> list[CollectiveRow]:
    return [_collective_row(fit) for fit in profile.fits]


def _collective_row(fit: CollectiveFit) -> CollectiveRow:
    largest = fit.measured[-1]
    algbw = largest.size_bytes / largest.time_ns
    return CollectiveRow(
        kind=fit.kind,
        group=fit.group,
        group_size=fit.group_size,
        from_bytes=fit.measured[0].size_bytes,
        to_bytes=largest.size_bytes,
        latency_ns=fit.latency_ns,
        algbw_gb_s=algbw,
        busbw_gb_s=algbw * bus_factor(fit.kind, fit.group_size),
        segments=len(fit.segments),
        passes=fit.passes,
        held_out=fit.held_out,
        held_out_sizes=fit.held_out_sizes,
        noise=fit.noise,
    )


def _sizes(row: CollectiveRow, dash: str) -> str:
    return f"{binary_size(row.from_bytes)} {dash} {binary_size(row.to_bytes)}"


_COLLECTIVE_COLUMNS: tuple[Column[CollectiveRow], ...] = (
    Column("kind", lambda row: row.kind, "Kind"),
    Column("group", lambda row: row.group, "Group"),
    Column(">ranks", lambda row: str(row.group_size), ">Ranks"),
    Column(">sizes", lambda row: _sizes(row, "-"), ">Sizes", lambda row: _sizes(row, "–")),
    Column(">latency", lambda row: duration(row.latency_ns), ">Latency"),
    Column(
        ">algbw",
        lambda row: significant(row.algbw_gb_s),
        ">algbw",
        lambda row: byte_rate(1e9 * row.algbw_gb_s),
    ),
    Column(
        ">busbw",
        lambda row: significant(row.busbw_gb_s),
        ">busbw",
        lambda row: byte_rate(1e9 * row.busbw_gb_s),
    ),
    Column(">held out", lambda row: percent(row.held_out), ">Held-out error"),
    Column(None, lambda row: percent(row.held_out_sizes), ">… sizes unseen too"),
    Column(">noise", lambda row: percent(row.noise), ">Noise floor"),
)


def collective_table(profile: Profile) -> Table[CollectiveRow]:
    title = "collectives, GB/s at the largest size"
    return Table(title=title, columns=_COLLECTIVE_COLUMNS, rows=collective_rows(profile))


def machine_rows(profile: Profile) -> list[tuple[str, str, str]]:
    """Label, value and spread of every ceiling."""
    rows = [
        (f"matmul {dtype}", flop_rate(flops), f"matmul {dtype}")
        for dtype, flops in sorted(profile.matmul_flops.items(), key=lambda pair: -pair[1])
    ]
    for name, (label, words) in _CEILINGS.items():
        value = getattr(profile, name)
        if value is not None:
            rows.append((label, words(value), name))
    return [(label, value, percent(profile.spread.get(name, 0.0))) for label, value, name in rows]


def calibration_answer(profile: Profile) -> Answer:
    return Answer(verdict=_verdict(profile), why=_why(profile), next=_next(profile))


def _verdict(profile: Profile) -> str:
    parts = []
    if profile.matmul_flops:
        dtype, best = max(profile.matmul_flops.items(), key=lambda pair: pair[1])
        parts.append(f"{flop_rate(best)} in {dtype} matmuls")
    if profile.copy_bytes_s:
        parts.append(f"{byte_rate(profile.copy_bytes_s)} copied")
    shown = next((row for row in collective_rows(profile) if row.kind == "all_reduce"), None)
    if shown:
        parts.append(
            f"all_reduce over {counted(shown.group_size, 'rank')} {duration(shown.latency_ns)} + "
            f"{byte_rate(shown.algbw_gb_s * 1e9)} ({profile.backend})"
        )
    return f"{profile.device}: {', '.join(parts)}"


def _why(profile: Profile) -> str:
    if not profile.fits:
        widest = max(profile.spread.items(), key=lambda pair: pair[1])
        rounds = f"{profile.rounds} rounds" if profile.rounds > 1 else "several runs"
        return f"best of {rounds}. {widest[0]} varies most, by {percent(widest[1])}"
    worst = max(profile.fits, key=lambda fit: fit.held_out)
    return (
        f"{counted(worst.passes, 'pass', 'passes')} in random order. Each pass is predicted "
        f"from the others, off by {percent(worst.held_out)} at worst ({worst.kind}, whose "
        f"passes differ by {percent(worst.noise)})"
    )


def _next(profile: Profile) -> str:
    if doubt := profile.doubt:
        return doubt
    if not profile.fits:
        return "to measure collectives too: stepscope calibrate --ranks N, or under torchrun"
    loudest = max(profile.fits, key=lambda fit: fit.noise)
    if loudest.noise > _DISTURBED:
        return (
            f"passes of {loudest.kind} differ by {percent(loudest.noise)}. If other programs "
            "use the machine, calibrate again when it is idle"
        )
    poor = [fit.kind for fit in profile.fits if fit.held_out > _POOR_FIT * fit.noise]
    if poor:
        return f"latency + bytes / rate fits {', '.join(poor)} poorly. See the plot (--html)"
    return "choose an algorithm: stepscope calibrate --compare 25MB --world 8"


def contention_sentence(profile: Profile) -> str | None:
    """How much an all-reduce and compute slow each other down; None if that was not measured."""
    contention = profile.contention
    if contention is None:
        return None
    slowdown = (
        f"while an all_reduce over {counted(contention.group_size, 'rank')} runs, compute "
        f"slows down. It loses {percent(contention.lost)} of the time that the all_reduce "
        "takes alone"
    )
    fit, line = profile.fit_for("all_reduce", contention.group_size), contention.beside[-1]
    largest = min(fit.measured[-1].size_bytes, line.to_bytes) if fit else 0
    if fit is None or largest < contention.beside[0].from_bytes:
        return slowdown
    return (
        f"{slowdown}. An all_reduce of {binary_size(largest)} then takes "
        f"{duration(line.at(largest))} instead of {duration(fit.expected_ns(largest))}"
    )


def calibration_json(profile: Profile, saved: Path) -> dict[str, Any]:
    """`calibrate --json`, schema 1 (docs/reference/json.md)."""
    return {
        "schema": SCHEMA,
        **to_builtins(calibration_answer(profile)),
        "saved": str(saved),
        "profile": to_builtins(profile),
        "collectives": to_builtins(collective_rows(profile)),
    }


def algorithm_name(name: str) -> str:
    """halving_doubling as people write it."""
    return name.replace("_", "-")


def algorithms_answer(comparison: AlgorithmComparison, profile: Profile) -> Answer:
    """Which all-reduce algorithm is fastest, and where the numbers come from."""
    fastest = " and ".join(map(algorithm_name, comparison.fastest))
    times = ", ".join(
        f"{algorithm_name(name)} {duration(ns)}" for name, ns in comparison.times_ns.items()
    )
    beta = comparison.beta_ns_per_byte
    crossovers = [
        f"{algorithm_name(crossover.below)} beats {algorithm_name(crossover.above)} below "
        f"{size(crossover.size_bytes)}"
        for crossover in comparison.crossovers
    ] or ["the order is the same at every size"]
    return Answer(
        verdict=(
            f"{fastest}{' tie' if len(comparison.fastest) > 1 else ' is fastest'} for an "
            f"all_reduce of {size(comparison.size_bytes)} over "
            f"{counted(comparison.ranks, 'rank')}: "
            f"{duration(min(comparison.times_ns.values()))}"
        ),
        why=(
            f"{times}. One hop takes {duration(comparison.alpha_ns)} and then moves "
            f"{byte_rate(1e9 / beta if beta else 0.0)}. This assumes that the all_reduce "
            f"measured over {counted(profile.world_size or 1, 'rank')} ({profile.backend}, "
            f"{profile.host}) ran as a ring"
        ),
        next="; ".join(crossovers) + ". Time both in your job before you choose (NCCL: NCCL_ALGO)",
    )


def algorithms_json(comparison: AlgorithmComparison, profile: Profile) -> dict[str, Any]:
    """`calibrate --compare --json`."""
    measured = ("host", "backend", "world_size", "when_unix")
    return {
        "schema": SCHEMA,
        **to_builtins(algorithms_answer(comparison, profile)),
        "comparison": to_builtins(comparison),
        "measured": {name: getattr(profile, name) for name in measured},
    }


# The collectives laboratory for every surface: sentences, tables, JSON.

_NOISY = 0.2  # passes of one step that differ by more: other programs used the machine
_NEAR = 2.0  # times: a crossover predicted better than that is right


def kinds_of(report: LaboratoryReport) -> list[str]:
    return list(dict.fromkeys(times.kind for times in report.algorithms))


def of_kind(report: LaboratoryReport, kind: str) -> list[AlgorithmTimes]:
    return [times for times in report.algorithms if times.kind == kind]


def laboratory_answer(report: LaboratoryReport) -> Answer:
    kind, link = kinds_of(report)[0], report.link
    ours = [times for times in of_kind(report, kind) if times.formula]
    ends = ", ".join(
        f"{_fastest(ours, at)} at {binary_size(ours[0].sizes[at].size_bytes)}" for at in (0, -1)
    )
    errors = [times.error for times in report.algorithms if times.error is not None]
    beta = link.beta_ns_per_byte
    rate = f"and then moves {_rate(beta)}" if beta else "at all sizes"
    return Answer(
        verdict=f"{kind} over {counted(report.world_size, 'rank')} ({report.backend}): "
        f"fastest {ends}",
        why=f"one step takes {duration(link.alpha_ns)} {rate}. With these rates the formulas are "
        f"{percent(median(errors))} off (median of {len(errors)}), {percent(max(errors))} at "
        "worst",
        next=_laboratory_next(report),
    )


def _fastest(algorithms: list[AlgorithmTimes], at: int) -> str:
    """Name the fastest at a size; "not clearly" if passes of another one were as fast."""
    best = min(algorithms, key=lambda times: times.sizes[at].time_ns)
    is_matched = any(
        times.sizes[at].low_ns <= best.sizes[at].high_ns
        for times in algorithms
        if times is not best
    )
    name = algorithm_name(best.algorithm)
    return f"{name} (not clearly)" if is_matched else name


def _laboratory_next(report: LaboratoryReport) -> str:
    if report.link.noise > _NOISY:
        return (
            f"passes of a single step differ by {percent(report.link.noise)}. Other programs "
            "use the machine: measure again when it is idle"
        )
    return _slowest_backend(report) or (
        "compare for other numbers of ranks: stepscope calibrate --compare 25MB --world 64"
    )


def _slowest_backend(report: LaboratoryReport) -> str:
    """Say where a textbook algorithm beats the backend's own most clearly, if one does."""
    largest, words = 1.0, ""
    for kind in kinds_of(report):
        times = {one.algorithm: one for one in of_kind(report, kind)}
        backend = times.pop(report.backend, None)
        for one in times.values() if backend else ():
            for ours, theirs in zip(one.sizes, backend.sizes, strict=True):  # type: ignore[union-attr]
                gain = theirs.low_ns / max(1, ours.high_ns)  # clear of both spreads
                if gain > largest:
                    largest = gain
                    words = (
                        f"{report.backend}'s own {kind} of {binary_size(ours.size_bytes)} takes "
                        f"{factor(theirs.time_ns / ours.time_ns)} times as long as "
                        f"{algorithm_name(one.algorithm)}. Try other settings of {report.backend}"
                    )
    return words


def algorithm_table(
    algorithms: Sequence[AlgorithmTimes], places: Sequence[int]
) -> Table[AlgorithmTimes]:
    """The times of one collective at these places among the sizes, and the formula's error."""
    sizes = [binary_size(one.size_bytes) for one in algorithms[0].sizes]

    def time_at(place: int) -> Column[AlgorithmTimes]:
        return Column(
            f">{sizes[place]}",
            lambda times: duration(times.sizes[place].time_ns),
            f">{sizes[place]}",
        )

    def unless_unknown(words: str) -> str:
        return "" if words == "-" else words

    def steps(times: AlgorithmTimes) -> str:
        return or_dash(times.steps, str)

    def sent(times: AlgorithmTimes) -> str:
        return or_dash(times.sent, lambda sent: f"{significant(sent)} n")

    def error(times: AlgorithmTimes) -> str:
        return or_dash(times.error, percent)

    return Table(
        title=algorithms[0].kind,
        columns=(
            Column("algorithm", lambda times: algorithm_name(times.algorithm), "Algorithm"),
            Column(None, lambda times: times.formula or "the backend's own", "Formula"),
            Column(">steps", steps, ">Steps", lambda times: unless_unknown(steps(times))),
            Column(">sent", sent, ">Sent", lambda times: unless_unknown(sent(times))),
            *map(time_at, places),
            Column(">formula off", error, ">Formula off", lambda t: unless_unknown(error(t))),
        ),
        rows=algorithms,
    )


def crossover_words(crossover: AlgorithmCrossover) -> tuple[str, str, str]:
    """Which two, the predicted size, the measured one."""
    pair = f"{algorithm_name(crossover.below)} → {algorithm_name(crossover.above)}"
    measured = crossover.measured_bytes
    seen = binary_size(measured) if measured else "not seen"
    return pair, binary_size(crossover.predicted_bytes), seen


_CROSSOVER_COLUMNS: tuple[Column[AlgorithmCrossover], ...] = (
    Column("collective", lambda one: one.kind, "Collective"),
    Column("from → to", lambda one: crossover_words(one)[0], "Small → large"),
    Column(">predicted", lambda one: crossover_words(one)[1], ">Predicted"),
    Column(">measured", lambda one: crossover_words(one)[2], ">Measured"),
)


def crossover_table(report: LaboratoryReport) -> Table[AlgorithmCrossover]:
    right, count = crossovers_right(report.crossovers), len(report.crossovers)
    title = f"crossovers: {right} of {count} predicted within a factor of two"
    return Table(title=title, columns=_CROSSOVER_COLUMNS, rows=report.crossovers)


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
        **to_builtins(report.link),
    }
    return {
        "schema": SCHEMA,
        **to_builtins(laboratory_answer(report)),
        "laboratory": to_builtins(report) | {"link": link},
    }


# `probe --json` and `library --json`.


def probe_json(report: ProbeReport) -> dict[str, Any]:
    body = to_builtins(report)
    return {"schema": 1, **body, "difference": report.difference, "library": str(library_file())}


def library_json(times: Sequence[OperatorTime]) -> dict[str, Any]:
    return {
        "schema": 1,
        "library": str(library_file()),
        "places": [
            {"place": place, "software": software, "mode": mode, "calls": count}
            for (place, software, mode), count in count_places(times)
        ],
    }


def count_places(times: Sequence[OperatorTime]) -> list[tuple[tuple[str, str, str], int]]:
    """Timed calls by place, software and mode."""
    counts = Counter(
        (time.place, time.software, time.call.mode) for time in times if time.forward is not None
    )
    return sorted(counts.items())
