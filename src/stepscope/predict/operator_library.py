"""Keep operator times that `stepscope probe` measured, and predict a step in another
precision, batch or place from them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.memory.model import ATTENTION
from stepscope.predict.autocast import changed_mode, traced_mode
from stepscope.predict.fitted import fitted
from stepscope.predict.step_context import StepContext
from stepscope.records.folders import user_folder
from stepscope.records.hardware import OperatorCall, OperatorTime, Output, PassTime, cpu_place
from stepscope.records.normal import NORMAL_95
from stepscope.text.figures import factor as factor_text
from stepscope.text.figures import percent
from stepscope.trace.run_folder.rank_facts import read_facts

if TYPE_CHECKING:
    import sqlite3

    from stepscope.predict.step_operators import StepOperators
    from stepscope.step.graph import Flags, Floats

# The library of operator times: one SQLite file in the user's folder.
#
# A library that is locked, damaged or not permitted is never an error for a prediction: it is
# reported in a sentence, and the prediction is made without it.

_WAIT_S = 2.0  # for another process that writes
_KEY = ("name", "shapes", "strides", "dtypes", "concrete", "grads", "mode")
_VALUES = (
    *("forward_ns", "forward_spread", "forward_repeats"),
    *("backward_ns", "backward_spread", "backward_repeats"),
    *("outputs", "host_ns", "source", "when_unix"),
)
_COLUMNS = (*_KEY, "place", "software", *_VALUES)
_CREATE = f"""CREATE TABLE IF NOT EXISTS operator_times (
    {", ".join(_COLUMNS)}, PRIMARY KEY ({", ".join((*_KEY, "place", "software"))}))"""
_PUT = f"""INSERT OR REPLACE INTO operator_times ({", ".join(_COLUMNS)})
    VALUES ({", ".join("?" * len(_COLUMNS))})"""


class LibraryProblemError(Exception):
    """The library cannot be used; the text says why and what to do."""


def library_file() -> Path:
    """In $STEPSCOPE_LIBRARY, else in the user's folder for data."""
    folder = user_folder("STEPSCOPE_LIBRARY", "library", "XDG_DATA_HOME", "~/.local/share")
    return folder / "operators.sqlite"


def save_times(times: Sequence[OperatorTime]) -> None:
    """Newer times of the same call, place and software replace older ones."""
    with _opened(create=True) as store:
        store.executemany(_PUT, [_as_row(time) for time in times])


def read_times(*, place: str | None = None, mode: str | None = None) -> list[OperatorTime]:
    """All times, or those of one place and mode. A library that does not exist is empty."""
    if not library_file().exists():
        return []
    wanted = {"place": place, "mode": mode}
    given = {name: value for name, value in wanted.items() if value is not None}
    where = " AND ".join(f"{name} = ?" for name in given) or "1"
    query = f"SELECT {', '.join(_COLUMNS)} FROM operator_times WHERE {where} ORDER BY when_unix"
    with _opened() as store:
        rows = store.execute(query, tuple(given.values())).fetchall()
    try:
        return [_from_row(dict(zip(_COLUMNS, row, strict=True))) for row in rows]
    except (msgspec.MsgspecError, TypeError, ValueError):
        raise LibraryProblemError(_damaged()) from None


def read_places() -> list[str]:
    """The devices that the library has times of."""
    if not library_file().exists():
        return []
    with _opened() as store:
        rows = store.execute("SELECT DISTINCT place FROM operator_times ORDER BY place").fetchall()
    return [str(place) for (place,) in rows]


@contextlib.contextmanager
def _opened(*, create: bool = False) -> Iterator[sqlite3.Connection]:
    import sqlite3

    file = library_file()
    try:
        if create:
            file.parent.mkdir(parents=True, exist_ok=True)
        store = sqlite3.connect(file, timeout=_WAIT_S)
    except (OSError, sqlite3.Error) as error:
        raise LibraryProblemError(f"the library {file} cannot be opened: {error}") from None
    try:
        with store:
            store.execute(_CREATE)
            columns = store.execute("PRAGMA table_info(operator_times)")
            there = {name for _, name, *_ in columns}
            for name in set(_VALUES) - there:  # a library of an earlier version lacks the newest
                store.execute(f"ALTER TABLE operator_times ADD COLUMN {name}")
            yield store
    except sqlite3.OperationalError as error:
        why = f"the library {file} cannot be used: {error}"
        if "locked" in str(error) or "busy" in str(error):
            why = f"the library {file} is locked by another process. Try again when that has ended"
        raise LibraryProblemError(why) from None
    except sqlite3.DatabaseError:
        raise LibraryProblemError(_damaged()) from None
    finally:
        store.close()


def _damaged() -> str:
    return f"the library {library_file()} is damaged. Remove it, then probe or import again"


def _as_row(time: OperatorTime) -> tuple[object, ...]:
    none = PassTime(ns=0.0, spread=0.0, repeats=0)
    timings = [
        getattr(timing or none, field)
        for timing in (time.forward, time.backward)
        for field in PassTime.__struct_fields__
    ]
    key = [getattr(time.call, name) for name in _KEY]
    outputs = msgspec.json.encode(time.outputs).decode()
    more = outputs, time.host_ns, time.source, time.when_unix
    return (*key, time.place, time.software, *timings, *more)


def _from_row(row: dict[str, object]) -> OperatorTime:
    def timing(name: str) -> dict[str, object] | None:
        fields = {field: row[f"{name}_{field}"] for field in PassTime.__struct_fields__}
        return fields if fields["repeats"] else None

    outputs = msgspec.json.decode(str(row["outputs"]), type=tuple[Output, ...])
    values = {
        "call": {name: row[name] for name in _KEY},
        "forward": timing("forward"),
        "backward": timing("backward"),
        "outputs": [msgspec.to_builtins(output) for output in outputs],
        **{name: row[name] for name in ("place", "software", "host_ns", "source", "when_unix")},
    }
    return msgspec.convert(values, OperatorTime)


# What is known of a call's time: measured exactly, else from neighbours, with its error.
#
# A neighbour is the same call with other software, or with shapes that all differ by one factor, as
# they do for another batch.

# Relative errors: if a library or driver changed, of a time between two neighbours of twice the
# size, and of one that is continued from one side only, for twice the size.
_OTHER_SOFTWARE = fitted("doubts.other_software")
_BETWEEN, _BESIDE = fitted("doubts.between_sizes"), fitted("doubts.beyond_size")
_FARTHEST = math.log(2.0) + 1e-9  # in size, from the nearest neighbour


class KnownTime(msgspec.Struct, frozen=True, kw_only=True):
    time: OperatorTime
    error: float  # relative
    basis: str  # probed, or remembered: from neighbours


class KnownTimes:
    """Times of one place."""

    def __init__(self, times: Iterable[OperatorTime], software: Collection[str]) -> None:
        """`software` of the step to predict, as far as it is known: names with versions."""
        self._exact: dict[OperatorCall, OperatorTime] = {}
        self._older: dict[OperatorCall, OperatorTime] = {}
        self._alike: dict[tuple[object, ...], list[OperatorTime]] = {}
        for time in times:  # later ones replace earlier ones
            same = set(software) <= set(time.software.split(", "))
            (self._exact if same else self._older)[time.call] = time
        for time in (*self._older.values(), *self._exact.values()):
            if time.forward:
                self._alike.setdefault(_without_sizes(time.call), []).append(time)

    def find(self, call: OperatorCall) -> KnownTime | None:
        if time := self._exact.get(call):
            return KnownTime(time=time, error=_spread(time), basis="probed")
        if time := self._older.get(call):
            error = math.hypot(_spread(time), _OTHER_SOFTWARE)
            return KnownTime(time=time, error=error, basis="remembered")
        return self._between(call)

    def _between(self, call: OperatorCall) -> KnownTime | None:
        sized = [
            (math.log(factor), time)
            for time in self._alike.get(_without_sizes(call), [])
            if (factor := size_factor(time.call, call)) is not None
        ]
        smaller = max((pair for pair in sized if pair[0] < 0), default=None, key=lambda p: p[0])
        larger = min((pair for pair in sized if pair[0] > 0), default=None, key=lambda p: p[0])
        nearest = [pair for pair in (smaller, larger) if pair]
        if not nearest or min(abs(distance) for distance, _ in nearest) > _FARTHEST:
            return None
        distance, first = nearest[0]
        if smaller and larger:
            wide = larger[0] - smaller[0]
            error = _BETWEEN * wide / math.log(4.0)
            passes = [
                _interpolated(low, high, -distance / wide)
                for low, high in zip(_passes(first), _passes(larger[1]), strict=True)
            ]
        else:
            error = _BESIDE * abs(distance) / math.log(2.0)
            factor = math.exp(-distance)
            passes = [one and replace(one, ns=one.ns * factor) for one in _passes(first)]
        spread = max(_spread(time) for _, time in nearest)
        forward, backward = passes
        return KnownTime(
            # Outputs are those of another size.
            time=replace(first, call=call, forward=forward, backward=backward, outputs=()),
            error=math.hypot(error, spread),
            basis="remembered",
        )


def size_factor(known: OperatorCall, wanted: OperatorCall) -> float | None:
    """How much larger the known call is, if one factor turns the wanted shapes into its own."""
    pairs = list(zip(_sides(known), _sides(wanted), strict=False))
    factors = {had / has for had, has in pairs if had != has and has and had}
    return factors.pop() if len(factors) == 1 else None


def _without_sizes(call: OperatorCall) -> tuple[object, ...]:
    """Return what stays of a call if its sizes change, such as the order of its dimensions."""
    order = tuple(
        tuple(sorted(range(len(steps)), key=lambda place: (-steps[place], place)))
        if isinstance(steps, list) and not any(isinstance(step, list) for step in steps)
        else ()
        for steps in _decoded(call.strides)
    )
    ranks = tuple(_rank(dims) for dims in _decoded(call.shapes))
    return call.name, call.dtypes, call.concrete, call.grads, call.mode, order, ranks


def _rank(dims: object) -> object:
    if not isinstance(dims, list):
        return 0
    return tuple(map(_rank, dims)) if dims and isinstance(dims[0], list) else len(dims)


def _decoded(text: str) -> list[object]:
    return msgspec.json.decode(text, type=list) if text else []


def _sides(call: OperatorCall) -> list[int]:
    sides: list[int] = []
    for dims in _decoded(call.shapes):
        for side in dims if isinstance(dims, list) else ():
            sides += side if isinstance(side, list) else [side]
    return sides


def _passes(time: OperatorTime) -> tuple[PassTime | None, PassTime | None]:
    return time.forward, time.backward


def _spread(time: OperatorTime) -> float:
    """Relative half interval of forward and backward together."""
    timings = [timing for timing in _passes(time) if timing]
    whole = sum(timing.ns for timing in timings)
    parts = sum((timing.ns * timing.spread) ** 2 for timing in timings)
    return math.sqrt(parts) / whole if whole else 0.0


def _interpolated(low: PassTime | None, high: PassTime | None, part: float) -> PassTime | None:
    if not low or not high:
        return None
    logs = math.log(max(low.ns, 1.0)), math.log(max(high.ns, 1.0))
    return replace(low, ns=math.exp(logs[0] + part * (logs[1] - logs[0])))


# A step in another precision or with another batch by the library's operator times.

# Times measured alone differ from those inside a step: caches, clocks and neighbours differ.
ALONE_ERROR = fitted("doubts.alone")
# A CPU's trace may be this much slower than the probe: calls wait for a core there. A device's
# kernels do not wait: where trace and probe differ more, the probe ran something else, such as
# made-up indices that fall differently, or a gradient more or less.
_MOST_SLOWER = 1.5
_MOST_GROWTH = 1.5  # over the samples': a cache that no longer holds them, a wave more
_MOST_BATCH_ERROR = 0.1  # relative, of a neighbour's time for another batch
_NOTED_DISAGREEMENT = 0.1
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
    from stepscope.predict.step_operators import find_step_operators

    forward = find_step_operators(context)
    modes = traced_mode(context), changed_mode(context, precision)
    now, then = (made_calls(context, forward, known, mode) for mode in modes)
    return _compare(forward, known, now, then, waits=context.on_host), ""


def find_probed_batch(context: StepContext, factor: float) -> tuple[ProbedStep | None, str]:
    """As `find_probed`, for `factor` times the samples. A neighbour's time, continued in
    proportion, does not count: the model of a kernel's growth says more. Nor does a call whose
    shapes stay: its samples may be counted otherwise, such as a graph's nodes beside its edges."""
    known, problem = _read_known(context)
    if known is None:
        return None, problem
    from stepscope.predict.step_operators import find_step_operators

    forward = find_step_operators(context)
    grown = grown_operators(context, forward, factor)
    if grown is None:
        return None, problem
    mode = traced_mode(context)
    now, then = (made_calls(context, operators, known, mode) for operators in (forward, grown))
    grows = [None if has == had else has for had, has in zip(now, then, strict=True)]
    waits = context.on_host
    probed = _compare(forward, known, now, grows, waits=waits, most_remembered=_MOST_BATCH_ERROR)
    if probed is None:
        return None, ""
    # More samples never take less time, and hardly more than their number: what two probes say
    # beyond that is noise.
    low, high = sorted((1.0, factor * (_MOST_GROWTH if factor > 1.0 else 1.0 / _MOST_GROWTH)))
    return replace(probed, factor=np.clip(probed.factor, low, high)), ""


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
    from stepscope.predict.step_operators import find_step_operators

    software = software_of(context)  # another machine has another driver
    there = KnownTimes(times, [name for name in software if not name.startswith("driver ")])
    forward = find_step_operators(context)
    calls = made_calls(context, forward, there, traced_mode(context))
    own_known = KnownTimes(own_times, software)
    return _compare(forward, there, calls, calls, waits=context.on_host, before=own_known), ""


def grown_operators(
    context: StepContext, operators: StepOperators, factor: float
) -> StepOperators | None:
    """The same calls with another batch; None if the trace does not say its batch, or the new one
    is no whole number."""
    batch = context.batch
    if not batch or context.grown != 1.0 or not (batch * factor).is_integer():
        return None
    from stepscope.predict.step_operators import grow_calls

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
    from stepscope.predict.step_operators import follow_values

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
        for backward, traced in enumerate(passes):
            mean_ns = float(traced[places].mean())
            timing = _passes(had.time)[backward] if had else None
            factor = _factor(timing, _passes(has.time)[backward], mean_ns, waits=waits)
            factors[backward, places] = factor
            if not math.isnan(factor):
                errors_ns.append(error * factor * mean_ns * len(places))
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
        error=math.hypot(noise / NORMAL_95, ALONE_ERROR, disagreement / 2),
        host_added_ns=_host_added_ns(known, pairs),
    )


def _host_added_ns(
    known: KnownTimes, pairs: Mapping[tuple[OperatorCall, OperatorCall], Sequence[int]]
) -> float | None:
    """None unless most calls that change were measured; the rest costs as much each."""
    changing = measured = 0
    added_ns = 0.0
    for (before, after), places in pairs.items():
        # Launches that a fused kernel saves are taken out of the step's graph, not out of casts.
        if before == after or before.name == ATTENTION:
            continue
        changing += len(places)
        had, has = known.find(before), known.find(after)
        if had and has and had.time.host_ns is not None and has.time.host_ns is not None:
            measured += len(places)
            added_ns += len(places) * (has.time.host_ns - had.time.host_ns)
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
