"""A calibration in words, for every surface: raw times -> profile -> verdict, rows, JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.explain.collectives import bus_factor
from stepscope.explain.roofline import doubt_about
from stepscope.predict.alpha_beta import fit_contention, fit_sweep
from stepscope.records.profile import Profile
from stepscope.records.words import counted
from stepscope.ui.words import duration

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.predict.algorithms import AlgorithmComparison
    from stepscope.records.profile import CollectiveFit

SCHEMA = 1
_DISTURBED = 0.2  # passes that disagree by more than this: the machine was not ours alone
_POOR_FIT = 1.5  # times the noise floor
_RATES = ("copy_bytes_s", "host_to_device_bytes_s", "device_to_host_bytes_s")
_COSTS = ("launch_ns", "launch_gap_ns", "tiny_op_ns")
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


class Row(msgspec.Struct, frozen=True, kw_only=True):
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


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """The first lines of every surface."""

    verdict: str
    why: str
    next: str


def profile_of(raw: dict[str, Any]) -> Profile:
    """What the ranks measured, fitted."""
    machine = raw["machine"]
    single = {name: machine[name] for name in (*_RATES, *_COSTS) if name in machine}
    spread = {f"matmul {dtype}": one["spread"] for dtype, one in machine["matmul_flops"].items()}
    refused = {f"{each['kind']}, {each['group']}": each["why"] for each in raw["not_offered"]}
    return Profile(
        host=raw["host"],
        device=raw["device"],
        kind=raw["kind"],
        torch=raw["torch"],
        when_unix=raw["when_unix"],
        world_size=raw["world_size"],
        backend=raw["backend"],
        threads=machine["threads"],
        matmul_flops={dtype: one["flops"] for dtype, one in machine["matmul_flops"].items()},
        **{name: one["value"] for name, one in single.items()},
        spread=spread | {name: one["spread"] for name, one in single.items()},
        not_offered=machine["not_offered"] | refused,
        fits=tuple(_fit(sweep) for sweep in raw["sweeps"]),
        contention=fit_contention(raw["world_size"], raw.get("contention") or []),
        other_cores=machine.get("other_cores"),
        cores=machine.get("cores"),
        rounds=machine.get("rounds", 1),
    )


def _fit(sweep: dict[str, Any]) -> CollectiveFit:
    names = ("kind", "group", "group_size", "sizes_bytes", "passes_ns")
    return fit_sweep(**{name: sweep[name] for name in names})


def rows_of(profile: Profile) -> list[Row]:
    """A row for each fit."""
    return [_row(fit) for fit in profile.fits]


def _row(fit: CollectiveFit) -> Row:
    largest = fit.measured[-1]
    algbw = largest.size_bytes / largest.time_ns
    return Row(
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


def words_of(profile: Profile) -> Words:
    """Verdict, why, next."""
    return Words(verdict=_verdict(profile), why=_why(profile), next=_next(profile))


def _verdict(profile: Profile) -> str:
    parts = []
    if profile.matmul_flops:
        dtype, best = max(profile.matmul_flops.items(), key=lambda pair: pair[1])
        parts.append(f"{rate(best, 'FLOP/s')} in {dtype} matmuls")
    if profile.copy_bytes_s:
        parts.append(f"{rate(profile.copy_bytes_s, 'B/s')} copied")
    shown = next((row for row in rows_of(profile) if row.kind == "all_reduce"), None)
    if shown:
        parts.append(
            f"all_reduce over {counted(shown.group_size, 'rank')} {duration(shown.latency_ns)} + "
            f"{rate(shown.algbw_gb_s * 1e9, 'B/s')} ({profile.backend})"
        )
    return f"{profile.device}: {', '.join(parts)}"


def _why(profile: Profile) -> str:
    if not profile.fits:
        widest = max(profile.spread.items(), key=lambda pair: pair[1])
        rounds = f"best of {profile.rounds} rounds" if profile.rounds > 1 else "of repeated runs"
        return f"{rounds}; the widest spread is that of {widest[0]}, {widest[1]:.0%}"
    worst = max(profile.fits, key=lambda fit: fit.held_out)
    return (
        f"{counted(worst.passes, 'pass', 'passes')} in random order: a fit without one pass is "
        "off by "
        f"{worst.held_out:.1%} on it at worst ({worst.kind}), where passes disagree by "
        f"{worst.noise:.1%}"
    )


def _next(profile: Profile) -> str:
    if doubt := doubt_about(profile):
        return doubt
    if not profile.fits:
        return "measure collectives too: stepscope calibrate --ranks N, or under torchrun"
    loudest = max(profile.fits, key=lambda fit: fit.noise)
    if loudest.noise > _DISTURBED:
        return (
            f"passes of {loudest.kind} disagree by {loudest.noise:.0%}: if others use the machine, "
            "calibrate again when it is idle"
        )
    poor = [fit.kind for fit in profile.fits if fit.held_out > _POOR_FIT * fit.noise]
    if poor:
        return f"lines do not describe {', '.join(poor)} well: look at the plot (--html)"
    return "choose an algorithm: stepscope calibrate --compare 25MB --world 8"


def beside_compute(profile: Profile) -> str | None:
    """What an all-reduce and compute cost each other, in a sentence; None where not measured."""
    found = profile.contention
    if found is None:
        return None
    told = (
        f"compute beside an all_reduce over {counted(found.group_size, 'rank')} loses "
        f"{found.lost:.0%} of the time that the all_reduce takes alone"
    )
    fit, line = profile.fit_for("all_reduce", found.group_size), found.beside[-1]
    largest = min(fit.measured[-1].size_bytes, line.to_bytes) if fit else 0
    if fit is None or largest < found.beside[0].from_bytes:
        return told
    lasts, alone = line.at(largest), fit.expected_ns(largest)
    return (
        f"{told}; one of {size(largest)} then lasts {duration(lasts)} instead of {duration(alone)}"
    )


def calibration_json(profile: Profile, saved: Path) -> dict[str, Any]:
    """`calibrate --json`, schema 1 (docs/json.md)."""
    return {
        "schema": SCHEMA,
        **msgspec.to_builtins(words_of(profile)),
        "saved": str(saved),
        "profile": msgspec.to_builtins(profile),
        "collectives": [msgspec.to_builtins(row) for row in rows_of(profile)],
    }


def compare_words(comparison: AlgorithmComparison, profile: Profile) -> Words:
    """What the formulas say, and where their numbers come from."""
    fastest = " and ".join(name.replace("_", "-") for name in comparison.fastest)
    times = ", ".join(
        f"{name.replace('_', '-')} {duration(ns)}" for name, ns in comparison.times_ns.items()
    )
    return Words(
        verdict=(
            f"{fastest}{' tie' if len(comparison.fastest) > 1 else ' is fastest'} for an "
            f"all_reduce of {size(comparison.size_bytes)} over "
            f"{counted(comparison.ranks, 'rank')}: "
            f"{duration(min(comparison.times_ns.values()))}"
        ),
        why=(
            f"{times}; a hop of {duration(comparison.alpha_ns)} + "
            f"{1 / comparison.beta_ns_per_byte if comparison.beta_ns_per_byte else 0:.2f} GB/s, "
            f"taking the all_reduce measured over {counted(profile.world_size or 1, 'rank')} "
            f"({profile.backend}, {profile.host}) to be a ring"
        ),
        next=_crossover_words(comparison),
    )


def _crossover_words(comparison: AlgorithmComparison) -> str:
    told = [
        f"{each.below.replace('_', '-')} beats {each.above.replace('_', '-')} below "
        f"{size(each.size_bytes)}"
        for each in comparison.crossovers
    ]
    if not told:
        told = ["at every size the order is the same"]
    return "; ".join(told) + "; time both in your job before you choose (NCCL: NCCL_ALGO)"


def compare_json(comparison: AlgorithmComparison, profile: Profile) -> dict[str, Any]:
    """`calibrate --compare --json`."""
    return {
        "schema": SCHEMA,
        **msgspec.to_builtins(compare_words(comparison, profile)),
        "comparison": msgspec.to_builtins(comparison),
        "measured": {
            "host": profile.host,
            "backend": profile.backend,
            "world_size": profile.world_size,
            "when_unix": profile.when_unix,
        },
    }


def rate(value: float, unit: str) -> str:
    """1.23 T..., three digits."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def size(value: float) -> str:
    """Bytes in the largest binary unit that suits."""
    for unit, scale in _UNITS:
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"
