"""From the ranks' raw times to a report: each algorithm against its formula, and crossovers.

Nothing is fitted to the algorithms' own times: the formula's alpha, beta and gamma come from
probes of the links, measured among the passes of the same collective.
"""

from __future__ import annotations

import math
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, Any

from stepscope.predict.collective_formulas import FORMULAS
from stepscope.predict.link_fit import fit_link
from stepscope.predict.schedule_cost import count_terms, predict_ns, step_loads
from stepscope.records.collectives.algorithms import ALGORITHMS, build_schedule
from stepscope.records.laboratory import (
    AlgorithmCrossover,
    AlgorithmTimes,
    LaboratoryReport,
    PredictedSize,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.records.laboratory import LinkModel

    Curve = Callable[[float], float]  # bytes -> ns
    Curves = dict[tuple[str, str], Curve]

_CLEAR = 1.25  # times: two algorithms nearer than that at an end of the sizes cross by accident
_FACTS = ("host", "device", "kind", "torch", "when_unix", "backend", "world_size", "checked")
_HALVINGS = 60


def analyse(raw: dict[str, Any]) -> LaboratoryReport:
    """What `measure` wrote with `algorithms` set."""
    kinds = dict.fromkeys(sweep["kind"] for sweep in raw["algorithms"])
    links = {
        kind: fit_link([one for one in raw["probes"] if one["kind"] == kind], raw["world_size"])
        for kind in kinds
    }
    hosts, groups = (tuple(map(tuple, raw[name])) for name in ("hosts", "groups"))
    algorithms, curves = [], {}
    for sweep in raw["algorithms"]:
        curve = None
        if sweep["algorithm"] in ALGORITHMS:
            curve = predicted_curve(
                sweep["algorithm"],
                sweep["kind"],
                raw["world_size"],
                links[sweep["kind"]],
                hosts,
                groups,
            )
            curves[sweep["kind"], sweep["algorithm"]] = curve
        algorithms.append(_times(sweep, curve, raw["world_size"], groups))
    return LaboratoryReport(
        **{name: raw[name] for name in _FACTS},
        hosts=hosts,
        groups=groups,
        link=links[next(iter(kinds))],
        algorithms=tuple(algorithms),
        crossovers=tuple(find_crossovers(algorithms, curves)),
    )


def predicted_curve(
    algorithm: str,
    kind: str,
    ranks: int,
    link: LinkModel,
    hosts: Sequence[Sequence[int]],
    groups: Sequence[Sequence[int]],
) -> Curve:
    """The formula as a function of the vector's bytes."""
    loads = step_loads(build_schedule(algorithm, kind, ranks, groups), hosts)
    return lambda size_bytes: predict_ns(loads, size_bytes, ranks, link)


def _times(
    sweep: dict[str, Any], curve: Curve | None, ranks: int, groups: Sequence[Sequence[int]]
) -> AlgorithmTimes:
    kind, algorithm = sweep["kind"], sweep["algorithm"]
    terms = count_terms(build_schedule(algorithm, kind, ranks, groups)) if curve else None
    sizes = tuple(
        _size(size_bytes, [median(one[place]) for one in sweep["passes_ns"]], curve)
        for place, size_bytes in enumerate(sweep["sizes_bytes"])
    )
    errors = [
        abs(one.predicted_ns / one.time_ns - 1) for one in sizes if one.predicted_ns is not None
    ]
    return AlgorithmTimes(
        kind=kind,
        algorithm=algorithm,
        formula=FORMULAS[algorithm, kind].words if curve else None,
        steps=int(terms.steps) if terms else None,
        sent=terms.sent if terms else None,
        added=terms.added if terms else None,
        sizes=sizes,
        error=median(errors) if errors else None,
    )


def _size(size_bytes: int, passes_ns: list[float], curve: Curve | None) -> PredictedSize:
    return PredictedSize(
        size_bytes=size_bytes,
        time_ns=round(median(passes_ns)),
        low_ns=round(min(passes_ns)),
        high_ns=round(max(passes_ns)),
        predicted_ns=curve(size_bytes) if curve else None,
    )


def find_crossovers(
    algorithms: Sequence[AlgorithmTimes], curves: Curves
) -> list[AlgorithmCrossover]:
    """Pairs that the formulas say clearly change places inside the measured sizes."""
    crossovers = []
    for one, other in combinations([times for times in algorithms if times.formula], 2):
        if one.kind != other.kind:
            continue
        crossover = _crossover(one, other, curves) or _crossover(other, one, curves)
        if crossover:
            crossovers.append(crossover)
    return sorted(crossovers, key=lambda found: (found.kind, found.predicted_bytes))


def _crossover(
    below: AlgorithmTimes, above: AlgorithmTimes, curves: Curves
) -> AlgorithmCrossover | None:
    """None unless `below` wins the smallest size and `above` the largest."""
    small, large = below.sizes[0].size_bytes, below.sizes[-1].size_bytes
    first, second = curves[below.kind, below.algorithm], curves[above.kind, above.algorithm]

    def ratio(size_bytes: float) -> float:
        return math.log(first(size_bytes) / second(size_bytes))

    if ratio(small) > -math.log(_CLEAR) or ratio(large) < math.log(_CLEAR):
        return None
    low, high = math.log(small), math.log(large)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(math.exp(middle)) < 0 else (low, middle)
    return AlgorithmCrossover(
        kind=below.kind,
        below=below.algorithm,
        above=above.algorithm,
        predicted_bytes=math.exp(low),
        measured_bytes=measured_crossing(below, above),
    )


def measured_crossing(below: AlgorithmTimes, above: AlgorithmTimes) -> float | None:
    """Where the measured times change places; the place that the fewest sizes contradict."""
    sizes = [one.size_bytes for one in below.sizes]
    ratios = [
        math.log(one.time_ns / other.time_ns)
        for one, other in zip(below.sizes, above.sizes, strict=True)
    ]
    against = [
        sum(ratio > 0 for ratio in ratios[:place]) + sum(ratio <= 0 for ratio in ratios[place:])
        for place in range(len(sizes) + 1)
    ]
    place = min(range(len(against)), key=against.__getitem__)
    if place in (0, len(sizes)):
        return None
    left, right = ratios[place - 1], ratios[place]
    share = -left / (right - left) if left < 0 < right else 0.5
    wider = sizes[place] / sizes[place - 1]
    return float(sizes[place - 1] * wider**share)
