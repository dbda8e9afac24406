"""The roofline: the least time that each operator's arithmetic and bytes need, its gap to
it, and its shapes as people write them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.flops.costs import Costs, Pieces
from stepscope.records.dtypes import PEAKS
from stepscope.records.hardware import (
    Bound,
    Ceilings,
    DeviceSpec,
    PeakSource,
    Phase,
    Profile,
    Spot,
    find_device,
)
from stepscope.records.trace import Trace
from stepscope.step.call_tree import group, sum_by
from stepscope.step.phases import PHASES
from stepscope.text.figures import significant
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.step.arrays import Bools, Floats, Indices, Int64s

# The roof of a call is the longer of FLOPs / peak and bytes / bandwidth, with every byte counted
# once. A gap may be negative: data that stays in a cache is not read from memory again.

BUSY = 0.15  # of the cores, by other processes
_known_device = lru_cache(maxsize=64)(find_device)  # most ranks of a job have the same device


def find_ceilings(trace: Trace, profile: Profile | None) -> Ceilings | None:
    """As calibrated, else from the data sheet; None where neither knows the device."""
    spec = _spec(trace)
    flops: dict[str, float] = dict(spec.peaks) if spec else {}
    flops_source: dict[str, PeakSource] = dict.fromkeys(flops, "table")
    bytes_s = spec.bandwidth_bytes_s if spec else None
    bytes_source: PeakSource | None = "table" if spec else None
    source = [spec.source] if spec else []
    if profile:
        flops |= profile.matmul_flops
        flops_source |= dict.fromkeys(profile.matmul_flops, "calibrated")
        if profile.copy_bytes_s:
            bytes_s, bytes_source = profile.copy_bytes_s, "calibrated"
        source = [f"measured by stepscope calibrate on {profile.host}", *source]
    if not flops and bytes_s is None:
        return None
    return Ceilings(
        device=trace.device_name or (profile.device if profile else "") or trace.kind,
        flops=flops,
        bytes_s=bytes_s,
        flops_source=flops_source,
        bytes_source=bytes_source,
        source="; for the rest: ".join(source),
        threads=profile.threads if profile and profile.kind == "cpu" else None,
        doubt=doubt_about(profile) if profile else "",
    )


def doubt_about(profile: Profile) -> str:
    """A sentence on why a CPU's measured ceilings may be too low; empty without such a reason."""
    others, cores = profile.other_cores, profile.cores
    if profile.kind != "cpu" or others is None or not cores or others < BUSY * cores:
        return ""
    return (
        f"calibrated while other processes kept {significant(others)} of {cores:g} cores busy: "
        "the machine can do more than these ceilings; run stepscope calibrate again when it is idle"
    )


def _spec(trace: Trace) -> DeviceSpec | None:
    name = trace.device_name
    if name is None:
        return None
    device = next(device for device in trace.devices if device.name == name)
    memory, multiprocessors = max(device.memory_bytes, 0), max(device.multiprocessors, 0)
    return _known_device(name, memory or None, multiprocessors or None)


def list_spots(
    trace: Trace, costs: Costs, pieces: Pieces, ceilings: Ceilings | None
) -> tuple[Spot, ...]:
    """One row per operator, shapes, dtype and phase with device time; the widest gap first."""
    host = trace.host
    worked = pieces.operator >= 0
    first, place, count = group(pieces.operator[worked])
    if not count:
        return ()
    rows = pieces.operator[worked][first]
    time = sum_by(place, pieces.dur_ns[worked], count)
    weight = _count_calls(pieces.replayed[worked], pieces.call_part[worked], place, count)
    signature = costs.signature[rows]
    what = np.where(signature >= 0, signature, len(costs.calls) + host.name[rows])
    first, inverse, count = group(
        what, costs.dtype[rows], costs.phase[rows], costs.recomputed[rows]
    )
    calls = np.bincount(inverse, weights=weight, minlength=count) / pieces.steps
    sample = rows[first]
    outer = (costs.flops[rows] > 0) & ~costs.counted[rows]  # its FLOPs are those inside it
    columns = zip(
        sample.tolist(),
        calls.tolist(),
        (sum_by(inverse, time, count) / pieces.steps).tolist(),
        _amounts(np.where(outer, 0, costs.flops[rows]), weight, inverse, count, pieces.steps),
        _amounts(
            np.where(outer, -1, costs.bytes_moved[rows]), weight, inverse, count, pieces.steps
        ),
        strict=True,
    )
    spots = []
    for row, times, device_ns, flops, moved in columns:
        shapes, dtype = host.shapes[row], int(costs.dtype[row])
        spot = Spot(
            operator=trace.strings[host.name[row]],
            shapes=" ".join(trace.strings[shapes].split()) if shapes >= 0 else "",
            dtype=PEAKS[dtype] if dtype >= 0 else "",
            calls=times,
            device_ns=device_ns,
            flops=flops,
            bytes_moved=moved,
            phase=phase_of(costs, row),
            recomputed=bool(costs.recomputed[row]),
        )
        spots.append(place_on_roofline(ceilings, spot))
    return widest_first(spots)


def widest_first(spots: list[Spot]) -> tuple[Spot, ...]:
    """By the gap; those without one last, the longest first."""
    return tuple(
        sorted(
            spots, key=lambda spot: (spot.gap_ns is None, -(spot.gap_ns or 0.0), -spot.device_ns)
        )
    )


def _count_calls(replayed: Bools, call_part: Floats, place: Indices, count: int) -> Floats:
    """Of each operator: one of its own if it launched something, and those that graphs replay."""
    own = np.bincount(place[~replayed], minlength=count) > 0
    again = np.bincount(place, weights=np.where(replayed, call_part, 0.0), minlength=count)
    total: Floats = own.astype(np.float64) + again
    return total


def _amounts(
    amount: Int64s, weight: Floats, inverse: Indices, count: int, steps: int
) -> list[float | None]:
    """Sums per step; None where the amount of one of the calls is unknown."""
    known = np.maximum(amount, 0) * weight
    total = np.bincount(inverse, weights=known, minlength=count) / steps
    unknown = np.bincount(inverse, weights=amount < 0, minlength=count) > 0
    return [None if gap else value for value, gap in zip(total.tolist(), unknown, strict=True)]


def phase_of(costs: Costs, row: int) -> Phase:
    return PHASES[costs.phase[row]]  # type: ignore[return-value]


def place_on_roofline(ceilings: Ceilings | None, spot: Spot) -> Spot:
    """The amounts of one step against what the device could do at best."""
    peak = ceilings.flops.get(spot.dtype) if ceilings else None
    bytes_s = ceilings.bytes_s if ceilings else None
    flops, moved, device_ns = spot.flops, spot.bytes_moved, spot.device_ns
    by_flops = flops / peak * 1e9 if flops and peak else None
    by_bytes = moved / bytes_s * 1e9 if moved and bytes_s else None
    roof = _roof(flops, by_flops, by_bytes)
    return replace(
        spot,
        intensity=flops / moved if flops and moved else None,
        achieved_flops=flops / device_ns * 1e9 if flops and device_ns else None,
        ceiling_flops=flops / roof * 1e9 if flops and roof else None,
        roof_ns=roof,
        gap_ns=device_ns - roof if roof is not None else None,
        bound=_bound(flops, by_flops, by_bytes),
    )


def _roof(flops: float | None, by_flops: float | None, by_bytes: float | None) -> float | None:
    """The longer time; None if the FLOPs are unknown, or if there are some but no known peak."""
    if flops is None or (flops and by_flops is None):
        return None
    return max((time for time in (by_flops, by_bytes) if time is not None), default=None)


def _bound(flops: float | None, by_flops: float | None, by_bytes: float | None) -> Bound:
    if flops == 0:
        return "memory" if by_bytes is not None else "unknown"
    if flops is None or by_flops is None:
        return "unknown"
    return "memory" if by_bytes is not None and by_bytes > by_flops else "compute"


# Shapes as people write them.

MOST = 3  # shapes in a sentence


def which_call(spot: Spot, most: int | None = None) -> str:
    """What tells a row of the roofline from others of its operator: shapes, else a line."""
    words = shape_words(spot.shapes, most)
    return words if words or spot.place is None else spot.place.short


def shape_words(shapes: str, most: int | None = None) -> str:
    """`8192×768, 768×2304` of the profiler's JSON; arguments without a shape are left out."""
    try:
        given = msgspec.json.decode(shapes)
    except msgspec.DecodeError:
        return shapes
    if not isinstance(given, list):
        return shapes
    words = [word for dims in given if isinstance(dims, list) and dims and (word := _dims(dims))]
    if most is not None and len(words) > most:
        words = [*words[:most], "…"]
    return ", ".join(words)


def _dims(dims: list[object]) -> str:
    if any(isinstance(size, list) for size in dims):
        return counted(len(dims), "tensor")
    return "×".join(map(str, dims))
