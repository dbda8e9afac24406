"""Report measured collective algorithms against their formulas, with crossovers.

Only `stepscope calibrate` uses it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.predict.collective_times import evaluate, fit_sweep
from stepscope.records.collective_schedules import (
    ALGORITHMS,
    CollectiveSchedule,
    Transfer,
    build_schedule,
)
from stepscope.records.hardware import (
    AlgorithmCrossover,
    AlgorithmTimes,
    CollectiveFit,
    LaboratoryReport,
    LinkModel,
    PredictedSize,
    Segment,
)

if TYPE_CHECKING:
    Curve = Callable[[float], float]
    Curves = dict[tuple[str, str], Curve]
    Times = list[list[float]]

# From the ranks' raw times to a report: each algorithm against its formula, and crossovers.
#
# Nothing is fitted to the algorithms' own times: the formula's alpha, beta and gamma come from
# probes of the links, measured among the passes of the same collective.

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
            named = sweep["algorithm"], sweep["kind"]
            schedule = build_schedule(*named, raw["world_size"], groups)
            curve = predicted_curve(schedule, links[sweep["kind"]], hosts)
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
    schedule: CollectiveSchedule, link: LinkModel, hosts: Sequence[Sequence[int]]
) -> Curve:
    """The formula as a function of the vector's bytes."""
    loads = step_loads(schedule, hosts)
    return lambda size_bytes: predict_ns(loads, size_bytes, schedule.ranks, link)


def _times(
    sweep: dict[str, Any], curve: Curve | None, ranks: int, groups: Sequence[Sequence[int]]
) -> AlgorithmTimes:
    kind, algorithm = sweep["kind"], sweep["algorithm"]
    terms = count_terms(build_schedule(algorithm, kind, ranks, groups)) if curve else None
    sizes = []
    for place, size_bytes in enumerate(sweep["sizes_bytes"]):
        passes_ns = [median(one[place]) for one in sweep["passes_ns"]]
        times = PredictedSize(
            size_bytes=size_bytes,
            time_ns=round(median(passes_ns)),
            low_ns=round(min(passes_ns)),
            high_ns=round(max(passes_ns)),
            predicted_ns=curve(size_bytes) if curve else None,
        )
        sizes.append(times)
    errors = [
        abs(one.predicted_ns / one.time_ns - 1) for one in sizes if one.predicted_ns is not None
    ]
    return AlgorithmTimes(
        kind=kind,
        algorithm=algorithm,
        formula=FORMULAS[algorithm, kind] if curve else None,
        steps=terms.steps if terms else None,
        sent=terms.sent if terms else None,
        added=terms.added if terms else None,
        sizes=tuple(sizes),
        error=median(errors) if errors else None,
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


# The textbook formula of each algorithm, for p ranks and n bytes; r ranks on each of h hosts.
# Halving-doubling and recursive doubling are exact for powers of two; other numbers need two more
# steps, which `count_terms` counts.

FORMULAS = {
    ("ring", "all_reduce"): "2(p-1)·α + 2(p-1)/p·nβ + (p-1)/p·nγ",
    ("ring", "all_gather"): "(p-1)·α + (p-1)/p·nβ",
    ("ring", "reduce_scatter"): "(p-1)·α + (p-1)/p·nβ + (p-1)/p·nγ",
    ("binomial_tree", "all_reduce"): "2⌈log p⌉·(α + nβ) + ⌈log p⌉·nγ",
    ("binomial_tree", "all_gather"): "2⌈log p⌉·α + (⌈log p⌉ + (p-1)/p)·nβ",
    ("binomial_tree", "reduce_scatter"): "2⌈log p⌉·α + (⌈log p⌉ + (p-1)/p)·nβ + ⌈log p⌉·nγ",
    ("halving_doubling", "all_reduce"): "2 log p·α + 2(p-1)/p·nβ + (p-1)/p·nγ",
    ("halving_doubling", "all_gather"): "log p·α + (p-1)/p·nβ",
    ("halving_doubling", "reduce_scatter"): "log p·α + (p-1)/p·nβ + (p-1)/p·nγ",
    ("recursive_doubling", "all_reduce"): "log p·(α + nβ + nγ)",
    ("bruck", "all_reduce"): "2⌈log p⌉·α + 2(p-1)/p·nβ + (p-1)/p·nγ",
    ("bruck", "all_gather"): "⌈log p⌉·α + (p-1)/p·nβ",
    ("bruck", "reduce_scatter"): "⌈log p⌉·α + (p-1)/p·nβ + (p-1)/p·nγ",
    ("direct", "all_reduce"): "2·α + 2(p-1)/p·nβ + (p-1)/p·nγ",
    ("direct", "all_gather"): "α + (p-1)/p·nβ",
    ("direct", "reduce_scatter"): "α + (p-1)/p·nβ + (p-1)/p·nγ",
    ("hierarchical", "all_reduce"): "2(r-1+h-1)·α + 2(p-1)/p·nβ + (p-1)/p·nγ",
    ("hierarchical", "all_gather"): "(r-1+h-1)·α + (p-1)/p·nβ",
    ("hierarchical", "reduce_scatter"): "(r-1+h-1)·α + (p-1)/p·nβ + (p-1)/p·nγ",
}
# Both halves of its all-reduce in one; apart from each other they cost what the halves do.
for _half in ("all_gather", "reduce_scatter"):
    FORMULAS["recursive_doubling", _half] = FORMULAS["halving_doubling", _half]

# What a schedule costs, counted from its messages: the formula for every number of ranks.
#
# A step ends when its busiest rank is done: with alpha, its bytes x beta and what it adds x gamma.
# Ranks of one host share its link to other hosts.


class StepLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Bytes are shares of the vector."""

    sent: float  # by the busiest rank, or got by it
    inside: float  # the same for messages inside a host
    between: float  # leaving the busiest host, or coming to it
    added: float  # by the busiest rank
    messages: int  # of the busiest rank
    senders: int


class CollectiveTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Multiples of alpha, and of the vector's bytes."""

    steps: int
    sent: float
    added: float


def step_loads(schedule: CollectiveSchedule, hosts: Sequence[Sequence[int]]) -> list[StepLoad]:
    """One for each step; `hosts` lists the ranks of each."""
    host_of = {rank: place for place, host in enumerate(hosts) for rank in host}
    return [_load(step, schedule.chunks, host_of) for step in schedule.steps]


def count_terms(schedule: CollectiveSchedule) -> CollectiveTerms:
    """Steps, bytes sent and bytes added, as the textbook counts them."""
    loads = step_loads(schedule, [range(schedule.ranks)])
    return CollectiveTerms(
        steps=len(loads),
        sent=sum(load.sent for load in loads),
        added=sum(load.added for load in loads),
    )


def predict_ns(loads: Sequence[StepLoad], size_bytes: float, ranks: int, link: LinkModel) -> float:
    """How long a collective of so many bytes takes."""
    return link.start_ns + sum(_step_ns(load, size_bytes, ranks, link) for load in loads)


def _step_ns(load: StepLoad, size_bytes: float, ranks: int, link: LinkModel) -> float:
    if link.inside is None:
        # Between a pair on its own and everyone at once, by the number of ranks that send.
        sent_bytes = load.sent * size_bytes
        alone, together = _at(link.pair, sent_bytes), _at(link.hop, sent_bytes)
        busy = min(1.0, max(0, load.senders - 2) / (ranks - 2)) if ranks > 2 else 1.0
        travel = alone + (together - alone) * busy
    else:
        ways = ((link.inside, load.inside), (link.hop, load.between))
        travel = max((_at(line, share * size_bytes) for line, share in ways if share), default=0.0)
    further = (load.messages - 1) * link.message_ns
    return travel + further + load.added * size_bytes * link.gamma_ns_per_byte


def _at(line: Sequence[Segment], size_bytes: float) -> float:
    return float(evaluate(line, np.array([size_bytes]))[0])


def _load(step: tuple[Transfer, ...], chunks: int, host_of: dict[int, int]) -> StepLoad:
    ways: dict[str, Counter[tuple[str, int]]] = {"all": Counter(), "inside": Counter()}
    hosts: Counter[tuple[str, int]] = Counter()
    added: Counter[int] = Counter()
    messages: Counter[int] = Counter()
    for one in step:
        source, target, count = one.source, one.target, len(one.chunks)
        near = host_of[source] == host_of[target]
        for way in ("all", "inside") if near else ("all",):
            ways[way]["out", source] += count
            ways[way]["in", target] += count
        if not near:
            hosts["out", host_of[source]] += count
            hosts["in", host_of[target]] += count
        added[target] += count if one.adds else 0
        messages[source] += 1
    return StepLoad(
        sent=max(ways["all"].values()) / chunks,
        inside=max(ways["inside"].values(), default=0) / chunks,
        between=max(hosts.values(), default=0) / chunks,
        added=max(added.values()) / chunks,
        messages=max(messages.values()),
        senders=len(messages),
    )


# What one step costs, from probes: the same step once and several times over.

_FEW = 3  # the smallest sizes, where bytes hardly count


def fit_link(probes: Sequence[dict[str, Any]], ranks: int) -> LinkModel:
    """Probes as the ranks wrote them: name, steps, sizes_bytes, passes_ns."""
    times = {
        (probe["name"], probe["steps"]): [
            [float(median(calls)) for calls in one] for one in probe["passes_ns"]
        ]
        for probe in probes
    }
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
    # What adding takes at the two largest sizes, per byte.
    more = _each(lambda step, add: add - step, steps, adds)
    adding = [row[place] / sizes[place] for row in more for place in (-2, -1)]
    message_ns = 0.0
    if fan:  # every rank sends ranks - 1 small messages instead of one
        more = _each(lambda step, together: together - step, steps, fan)
        message_ns = max(0.0, median(_flat(more, 1)) / (ranks - 2))
    return LinkModel(
        start_ns=start,
        hop=hop.segments,
        pair=_fit(sizes, pair, ranks).segments if pair else hop.segments,
        inside=_fit(sizes, inside, ranks).segments if inside else None,
        gamma_ns_per_byte=max(0.0, median(adding)),
        message_ns=message_ns,
        noise=hop.noise,
    )


def _fit(sizes: list[int], steps: Times, ranks: int) -> CollectiveFit:
    by_call = [[[ns] for ns in row] for row in steps]
    return fit_sweep(
        kind="hop", group="world", group_size=ranks, sizes_bytes=sizes, passes_ns=by_call
    )


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
