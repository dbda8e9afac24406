"""A step in another precision or with another batch by the library's operator times."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.predict.grown_calls import grow_calls
from stepscope.predict.known_times import KnownTimes
from stepscope.predict.operator_library import LibraryProblemError, read_places, read_times
from stepscope.predict.step_operators import find_step_operators
from stepscope.predict.traced_mode import changed_mode, traced_mode
from stepscope.predict.value_flow import follow_values
from stepscope.records.figures import factor as factor_text
from stepscope.records.figures import percent
from stepscope.records.operator_times import cpu_place
from stepscope.trace.rank_facts import read_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stepscope.explain.replay.graph import Flags, Floats
    from stepscope.predict.known_times import KnownTime
    from stepscope.predict.step_context import StepContext
    from stepscope.predict.step_operators import StepOperators
    from stepscope.records.operator_times import OperatorCall, Output, PassTime

# Times measured alone differ from those inside a step: caches, clocks and neighbours differ.
ALONE_ERROR = 0.03
# A CPU's trace may be this much slower than the probe: calls wait for a core there. A device's
# kernels do not wait: where trace and probe differ more, the probe ran something else, such as
# made-up indices that fall differently, or a gradient more or less.
_MOST_SLOWER = 1.5
_MOST_GROWTH = 1.5  # over the samples': a cache that no longer holds them, a wave more
_MOST_BATCH_ERROR = 0.1  # relative, of a neighbour's time for another batch
_NOTED_DISAGREEMENT = 0.1
# Launches that a fused kernel saves are taken out of the step's graph, not out of casts.
_FUSES = "aten::scaled_dot_product_attention"
_MOST_MEASURED = 0.8  # of the calls that change: enough to know the host's cost


class ProbedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What the library says about the items of a step (calls of a CPU, tasks of a device)."""

    factor: Floats  # new time over the present one; 1 where it is not known
    known: Flags
    probed_share: float  # of all items' time: measured exactly
    remembered_share: float  # from neighbours
    disagreement: float  # logarithm: the trace over the probe in the trace's own precision
    error: float  # of the known part, a standard deviation relative to all of it
    host_added_ns: float | None = None  # what the host needs more; None: not measured

    @property
    def modelled_share(self) -> float:
        return max(0.0, 1.0 - self.probed_share - self.remembered_share)

    def describe(self, others: str) -> str:
        """`others` is what happens to the rest."""
        words = (
            f"operator times: {percent(self.probed_share)} probed, "
            f"{percent(self.remembered_share)} from similar operators in the library, "
            f"{percent(self.modelled_share)} {others}"
        )
        if self.disagreement < _NOTED_DISAGREEMENT:
            return words
        change = factor_text(math.exp(self.disagreement))
        return (
            f"{words}. The probed times of the present step differ {change} times from the traced "
            "ones"
        )


def place_of(context: StepContext) -> str | None:
    """The device that the trace ran on, as the library names it."""
    if not context.on_host:
        return context.trace.device_name
    host = context.trace.facts.get("host_name")
    load = context.cpu.load if context.cpu else None
    return cpu_place(str(host), load.threads if load else 0) if host else None


def software_of(context: StepContext) -> tuple[str, ...]:
    """Names with versions, as far as the trace and its folder say."""
    torch = read_facts(Path(context.trace.path).parent).get("torch")
    driver = context.trace.facts.get("cuda_driver_version")
    known = {"torch": torch, "driver": driver}
    return tuple(f"{name} {version}" for name, version in known.items() if version)


def find_probed(context: StepContext, precision: str) -> tuple[ProbedStep | None, str]:
    """The step's items in another precision, None if the library has nothing; and what to say
    about a library that cannot be used."""
    known, problem = _read_known(context)
    if known is None:
        return None, problem
    forward = find_step_operators(context)
    modes = traced_mode(context), changed_mode(context, precision)
    now, then = (made_calls(context, forward, known, mode) for mode in modes)
    return _compare(forward, known, now, then, waits=context.on_host), ""


def find_probed_batch(context: StepContext, factor: float) -> tuple[ProbedStep | None, str]:
    """As `find_probed`, for `factor` times the samples. A neighbour's time, continued in
    proportion, does not count: the model of a kernel's growth says more. Nor does a call whose
    shapes stay: its samples may be counted otherwise, such as a graph's nodes beside its edges."""
    known, problem = _read_known(context)
    forward = find_step_operators(context) if known else None
    grown = grown_operators(context, forward, factor) if forward else None
    if known is None or forward is None or grown is None:
        return None, problem
    mode = traced_mode(context)
    now, then = (made_calls(context, operators, known, mode) for operators in (forward, grown))
    grows = [None if has == had else has for had, has in zip(now, then, strict=True)]
    waits = context.on_host
    probed = _compare(forward, known, now, grows, waits=waits, most_remembered=_MOST_BATCH_ERROR)
    return (replace(probed, factor=_within(probed.factor, factor)) if probed else None), ""


def find_probed_elsewhere(
    context: StepContext, is_there: Callable[[str], bool]
) -> tuple[ProbedStep | None, str]:
    """As `find_probed`, for the step as it is on another device, if it was probed there.

    Where it was also probed on its own device, the ratio of both times counts.
    """
    own = place_of(context)
    if own is None or not context.is_as_traced:
        return None, ""
    try:
        times = [
            time for place in read_places() if is_there(place) for time in read_times(place=place)
        ]
        own_times = read_times(place=own) if times else []
    except LibraryProblemError as problem:
        return None, f"{problem}. The prediction does not use them"
    if not times:
        return None, ""
    software = software_of(context)  # another machine has another driver
    there = KnownTimes(times, [name for name in software if not name.startswith("driver ")])
    forward = find_step_operators(context)
    calls = made_calls(context, forward, there, traced_mode(context))
    own_known = KnownTimes(own_times, software)
    return _compare(forward, there, calls, calls, waits=context.on_host, before=own_known), ""


def _within(growth: Floats, factor: float) -> Floats:
    """More samples never take less time, and hardly more than their number: what two probes say
    beyond that is noise."""
    low, high = sorted((1.0, factor * (_MOST_GROWTH if factor > 1.0 else 1.0 / _MOST_GROWTH)))
    clipped: Floats = np.clip(growth, low, high)
    return clipped


def grown_operators(
    context: StepContext, operators: StepOperators, factor: float
) -> StepOperators | None:
    """The same calls with another batch; None if the trace does not say its batch, or the new one
    is no whole number."""
    batch = context.batch
    if not batch or context.grown != 1.0 or not (batch * factor).is_integer():
        return None
    parameters = parameter_shapes(context) or frozenset()
    calls = grow_calls(operators.calls, parameters, batch=batch, factor=factor)
    return replace(operators, calls=calls)


def _read_known(context: StepContext) -> tuple[KnownTimes | None, str]:
    """The library's times of this place, or what to say about a library that cannot be used."""
    place = place_of(context)
    if place is None or not context.is_as_traced:
        return None, ""
    try:
        times = read_times(place=place)
    except LibraryProblemError as problem:
        return None, f"{problem}. The prediction does not use them"
    return (KnownTimes(times, software_of(context)) if times else None), ""


def made_calls(
    context: StepContext, forward: StepOperators, known: KnownTimes, mode: str
) -> list[OperatorCall]:
    """The step's calls as they are made in a mode."""

    def outputs(call: OperatorCall) -> Sequence[Output] | None:
        found = known.find(call)
        return found.time.outputs if found else None

    traced = traced_mode(context)
    return follow_values(forward.calls, parameter_shapes(context), mode, outputs, traced=traced)


def parameter_shapes(context: StepContext) -> frozenset[tuple[int, ...]] | None:
    return frozenset(context.parameters.shapes) if context.parameters else None


def _compare(
    forward: StepOperators,
    known: KnownTimes,
    now: Sequence[OperatorCall],
    then: Sequence[OperatorCall | None],
    *,
    waits: bool,
    before: KnownTimes | None = None,
    most_remembered: float = math.inf,
) -> ProbedStep | None:
    """Ratios of two probed times: what both have too much cancels out. The present ones are
    `before`'s if they were taken elsewhere. Neighbours' times with more than `most_remembered`
    error do not count. `waits`: the traced calls may have waited, for a core for example."""
    pairs: dict[tuple[OperatorCall, OperatorCall], list[int]] = {}
    for place, (present, changed) in enumerate(zip(now, then, strict=True)):
        if changed is not None:
            pairs.setdefault((present, changed), []).append(place)
    passes = [forward.pass_ns(backward=backward) for backward in (False, True)]
    factors = np.full((2, len(forward.calls)), np.nan)
    exact = np.zeros(len(forward.calls), np.bool_)
    errors_ns, traced_ns, probed_ns = [0.0], 0.0, 0.0
    for (present, changed), places in pairs.items():
        had, has = (before or known).find(present), known.find(changed)
        if has is None or has.time.forward is None:
            continue
        if has.basis != "probed" and has.error > most_remembered:
            continue
        exact[places] = has.basis == "probed" and (had is None or had.basis == "probed")
        error = math.hypot(has.error, had.error if had else 0.0)
        for number, traced in enumerate(passes):
            mean_ns = float(traced[places].mean())
            factors[number, places] = factor = _factor(
                _timing(had, number == 1), _timing(has, number == 1), mean_ns, waits=waits
            )
            if not math.isnan(factor):
                errors_ns.append(error * factor * mean_ns * len(places))
                timing = _timing(had, number == 1)
                traced_ns += mean_ns * len(places) if timing else 0.0
                probed_ns += timing.ns * len(places) if timing else 0.0
    mine = forward.owner >= 0
    factor_of = np.full(len(forward.owner), np.nan)
    factor_of[mine] = factors[forward.in_backward[mine].astype(int), forward.owner[mine]]
    is_known = ~np.isnan(factor_of)
    total = float(forward.item_ns.sum())
    if not is_known.any() or not total:
        return None
    factor_of = np.where(is_known, factor_of, 1.0)
    is_exact = is_known & exact[np.maximum(forward.owner, 0)]
    known_ns = float((factor_of * forward.item_ns)[is_known].sum())
    noise = math.sqrt(sum(error**2 for error in errors_ns)) / max(known_ns, 1.0)
    disagreement = abs(math.log(traced_ns / probed_ns)) if traced_ns and probed_ns else 0.0
    return ProbedStep(
        factor=factor_of,
        known=is_known,
        probed_share=float(forward.item_ns[is_exact].sum()) / total,
        remembered_share=float(forward.item_ns[is_known & ~is_exact].sum()) / total,
        disagreement=disagreement,
        error=math.hypot(noise / 1.96, ALONE_ERROR, disagreement / 2),
        host_added_ns=_host_added_ns(known, pairs),
    )


def _host_added_ns(
    known: KnownTimes, pairs: Mapping[tuple[OperatorCall, OperatorCall], Sequence[int]]
) -> float | None:
    """None unless most calls that change were measured; the rest costs as much each."""
    changing = measured = 0
    added_ns = 0.0
    for (before, after), places in pairs.items():
        if before == after or before.name == _FUSES:
            continue
        changing += len(places)
        had, has = (
            found.time.host_ns if (found := known.find(call)) else None for call in (before, after)
        )
        if had is not None and has is not None:
            measured += len(places)
            added_ns += len(places) * (has - had)
    if not measured or measured < _MOST_MEASURED * changing:
        return None
    return added_ns * changing / measured


def _factor(
    before: PassTime | None, after: PassTime | None, traced_ns: float, *, waits: bool
) -> float:
    """New time over the traced one; NaN if this pass was not timed, or the probe in the present
    precision was far off the trace.

    A CPU's trace may be slower than its probe because calls waited for a core. A wait does not grow
    with the call: what is beyond `_MOST_SLOWER` stays as it is.
    """
    if after is None or traced_ns <= 0:
        return math.nan
    if before is None or before.ns <= 0:
        return after.ns / traced_ns
    slower = traced_ns / before.ns
    if not waits:
        comparable = 1.0 / _MOST_SLOWER < slower < _MOST_SLOWER
        return after.ns / before.ns if comparable else math.nan
    slower = min(slower, _MOST_SLOWER)
    waited_ns = traced_ns - slower * before.ns
    return (after.ns * slower + waited_ns) / traced_ns


def _timing(known: KnownTime | None, backward: bool) -> PassTime | None:
    if known is None:
        return None
    return known.time.backward if backward else known.time.forward
