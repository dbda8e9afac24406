"""What one step costs, from probes: the same step once and several times over."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from stepscope.predict.alpha_beta import fit_sweep
from stepscope.records.laboratory import LinkModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.profile import CollectiveFit

    Times = list[list[float]]  # by pass, by size

_FEW = 3  # the smallest sizes, where bytes hardly count


def fit_link(probes: Sequence[dict[str, Any]], ranks: int) -> LinkModel:
    """Probes as the ranks wrote them: name, steps, sizes_bytes, passes_ns."""
    times = {(probe["name"], probe["steps"]): _medians(probe["passes_ns"]) for probe in probes}
    sizes = list(probes[0]["sizes_bytes"])
    (many,) = {steps for name, steps in times if name == "hop" and steps > 1}
    once, often = times["hop", 1], times["hop", many]
    steps = _each(lambda one, more: _positive((more - one) / (many - 1), more / many), once, often)
    start = max(0.0, median(_flat(_each(lambda one, step: one - step, once, steps), _FEW)))

    def per_step(name: str) -> Times | None:
        if (name, many) not in times:
            return None
        return _each(lambda ns: _positive((ns - start) / many, ns / many), times[name, many])

    hop = _fit(sizes, steps, ranks)
    adds, pair, fan, inside = map(per_step, ("add", "pair", "fan", "inside"))
    assert adds is not None
    return LinkModel(
        start_ns=start,
        hop=hop.segments,
        pair=_fit(sizes, pair, ranks).segments if pair else hop.segments,
        inside=_fit(sizes, inside, ranks).segments if inside else None,
        gamma_ns_per_byte=_gamma(sizes, steps, adds),
        message_ns=_message_ns(steps, fan, ranks) if fan else 0.0,
        noise=hop.noise,
    )


def _gamma(sizes: list[int], steps: Times, adds: Times) -> float:
    """What adding takes at the two largest sizes, per byte."""
    more = _each(lambda step, add: add - step, steps, adds)
    large = [row[place] / sizes[place] for row in more for place in (-2, -1)]
    return max(0.0, median(large))


def _message_ns(steps: Times, fan: Times, ranks: int) -> float:
    """Every rank sends ranks - 1 small messages instead of one."""
    more = _each(lambda step, all_of_them: all_of_them - step, steps, fan)
    return max(0.0, median(_flat(more, 1)) / (ranks - 2))


def _fit(sizes: list[int], steps: Times, ranks: int) -> CollectiveFit:
    by_call = [[[ns] for ns in row] for row in steps]
    return fit_sweep(
        kind="hop", group="world", group_size=ranks, sizes_bytes=sizes, passes_ns=by_call
    )


def _medians(passes_ns: list[list[list[float]]]) -> Times:
    return [[float(median(calls)) for calls in one] for one in passes_ns]


def _each(combine: Any, *times: Times) -> Times:
    """The same for every pass and size."""
    return [
        [combine(*values) for values in zip(*rows, strict=True)]
        for rows in zip(*times, strict=True)
    ]


def _flat(times: Times, first: int) -> list[float]:
    """All passes' values at the first sizes."""
    return [value for row in times for value in row[:first]]


def _positive(value: float, otherwise: float) -> float:
    """Noise can make a difference of two times negative."""
    return value if value > 0 else otherwise
