"""Make the plan for a target: compare many selections by their peak and their time."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from stepscope.fix.saved.memory_model import (
    BackwardMemory,
    StepMemory,
    backward_memory,
    step_memory,
)
from stepscope.fix.saved.plan_load import NO_LOAD, PlanLoad, plan_load
from stepscope.fix.saved.save_plan import (
    KEEP,
    SavePlan,
    plan_timeline,
    planned_action,
    planned_use,
    repeats,
    results,
    rows,
    use_action,
    with_points,
)
from stepscope.fix.saved.selection import ValueSelection, keep_everything, select
from stepscope.fix.saved.step_record import (
    OFFLOAD,
    HoldingOption,
    RecordedCall,
    SavedUse,
    StepRecord,
    host_waits,
    is_lossy,
)
from stepscope.records.change_values import MemoryTarget
from stepscope.text.figures import duration, percent, size

_WORTH = 0.98  # of the peak: less saved is not worth a plan
_SAME_PEAK = 1.005
_WEIGHTS_DOMINATE = 4
_LITTLE = 0.6  # of the time allowed
_NEAR_LIMIT = 0.8  # of the device's memory


@dataclass(frozen=True, slots=True)
class _Candidate:
    selection: ValueSelection
    memory: BackwardMemory
    load: PlanLoad
    extra_ns: int
    peak_bytes: int  # that the target limits: of the step where it is known, else of backward


@dataclass(frozen=True, slots=True)
class PlannedStep:
    plan: SavePlan
    meets_target: bool  # without a target of bytes, always
    read: bool  # its peaks rest on what the allocator held in the recorded step's backward
    load: PlanLoad = NO_LOAD
    host_late_ns: int = 0  # by which following it makes the host slower than the device is without
    waits: bool = False  # the host waits for the sizes of some encodings
    offloads: bool = False  # some values go to host memory
    compared: tuple[ValueSelection, ...] = ()  # that another limit of time may choose from


def make_plan(record: StepRecord, target: MemoryTarget) -> SavePlan:
    return plan_step(record, target).plan


def plan_step(
    record: StepRecord,
    target: MemoryTarget,
    *,
    compared: tuple[ValueSelection, ...] = (),
    searching: bool = True,
) -> PlannedStep:
    """`compared` were found for another limit of time; if not `searching`, no others are."""
    record = _without_suspects(record)
    plain_memory = backward_memory(record, keep_everything(record))
    around = step_memory(record, plain_memory)
    batch = target.batch or 1.0

    def score(selection: ValueSelection) -> _Candidate:
        return _candidate(record, with_measured_costs(record, selection), around, batch)

    plain = score(keep_everything(record))
    limit = _limit(record, target, plain, around)
    most_ns = target.most_ns(record.step_ns)
    found = [score(one) for one in compared if _is_possible(record, one)]
    limited = _with_host_limit(record, most_ns)

    def look(within: StepRecord) -> None:
        fits = None if limit is None else limit.allows
        for searched in _searched(within, free=limit is None and most_ns is None):
            found.extend(search(searched, score, fits=fits, most_ns=most_ns))

    if searching:
        look(record)
        if limited is not record and _asks_too_much(found, limited, most_ns):
            look(limited)
    found += [score(one) for mixed in found for one in _unmixed(mixed.selection)]
    timely = [one for one in found if is_timely(most_ns, limited.most_host_ns, one)]
    chosen = _best([plain, *timely], limit, timed=most_ns is not None)
    notes = []
    meets_target = limit is None or limit.allows(chosen)
    if limit is not None and not meets_target:
        notes.append(limit.missed(chosen, timed=most_ns is not None))
    if not _is_worthwhile(chosen, plain):
        chosen = plain
        notes.append(_why_nothing(plain, limit, found, target))
    elif limit is None and most_ns is not None and chosen.extra_ns < _LITTLE * most_ns:
        better = [one for one in found if one.peak_bytes < _WORTH * chosen.peak_bytes]
        held_back = _asks_too_much(better, limited, most_ns)
        notes.append(_why_no_more(chosen.extra_ns / record.step_ns, target, held_back=held_back))
    if any(is_lossy(option.encoding) for option in chosen.selection.encoded.values()):
        notes.append("Some values are rounded (lossy), so results differ from plain training.")
    notes.extend(_advice(record, plain.memory.peak_bytes, chosen.peak_bytes))
    return PlannedStep(
        plan=_plan(record, target, plain, chosen, around, tuple(notes)),
        meets_target=meets_target,
        read=record.backward_was_read,
        load=chosen.load,
        host_late_ns=_host_late_ns(record, chosen.load),
        waits=any(host_waits(one.encoding) for one in chosen.selection.encoded.values()),
        offloads=any(one.encoding == OFFLOAD for one in chosen.selection.encoded.values()),
        compared=() if most_ns is None or record.on_host else _undominated(found),
    )


def _with_host_limit(record: StepRecord, most_ns: float | None) -> StepRecord:
    """Before steps have shown what the host can take: it may need its slack and the time allowed,
    and then takes as long as the device may."""
    known = record.most_host_ns is not None or record.host_slack_ns is None
    if most_ns is None or known or record.on_host:
        return record
    return replace(record, most_host_ns=(record.host_slack_ns or 0) + round(most_ns))


def _asks_too_much(found: list[_Candidate], limited: StepRecord, most_ns: float | None) -> bool:
    """Whether something fits the device and not the host."""
    return any(
        is_timely(most_ns, None, one) and not is_timely(None, limited.most_host_ns, one)
        for one in found
    )


def plan_nothing(record: StepRecord, target: MemoryTarget, note: str) -> PlannedStep:
    """Everything is kept."""
    around = step_memory(record, backward_memory(record, keep_everything(record)))
    plain = _candidate(record, keep_everything(record), around, target.batch or 1.0)
    plan = _plan(record, target, plain, plain, around, (note,))
    return PlannedStep(plan=plan, meets_target=False, read=record.backward_was_read)


def _searched(record: StepRecord, *, free: bool) -> list[StepRecord]:
    """What selections are found in. Where a GPU hides a part of the host's costs, it may be best to
    count them or not; where heavy operators may be repeated, it may be best not to."""
    searched = [with_byte_costs(record) if free else record]
    if not free and not record.on_host:
        hidden = with_hidden_host(record, copies=record.most_host_ns is None)
        searched = [hidden] if record.most_host_ns is None else [record, hidden]
    heavy = frozenset(number for number, call in enumerate(record.operators) if call.heavy)
    if heavy:
        searched += [without_repeating(one, heavy) for one in searched]
    return searched


def without_repeating(record: StepRecord, operators: frozenset[int]) -> StepRecord:
    """These cannot be recognised in later passes."""
    calls = (
        replace(call, refusal="not recognised") if number in operators else call
        for number, call in enumerate(record.operators)
    )
    return replace(record, operators=tuple(calls))


def _without_suspects(record: StepRecord) -> StepRecord:
    """Without what has held up the steps of earlier plans."""
    if not record.may_wait:
        record = _without_options(record, host_waits)
    if not record.may_offload:
        record = _without_options(record, _is_offload)
    return record


def _without_options(record: StepRecord, refused: Callable[[str], bool]) -> StepRecord:
    values = (
        replace(value, options=tuple(o for o in value.options if not refused(o.encoding)))
        for value in record.values
    )
    return replace(record, values=tuple(values))


def _is_offload(encoding: str) -> bool:
    return encoding == OFFLOAD


def _unmixed(selection: ValueSelection) -> Iterator[ValueSelection]:
    """Where values are offloaded and others are encodings that wait, which hold each other up: the
    same with one of both kinds."""
    kinds = host_waits, _is_offload
    parts = [
        {value for value, option in selection.encoded.items() if of_kind(option.encoding)}
        for of_kind in kinds
    ]
    if not all(parts):
        return
    for part in parts:
        encoded = {v: option for v, option in selection.encoded.items() if v not in part}
        yield replace(selection, kept=selection.kept | part, encoded=encoded)


def _is_possible(record: StepRecord, selection: ValueSelection) -> bool:
    """Less may be repeated or encoded than when it was found."""
    offered = (
        option.encoding in {one.encoding for one in record.values[value].options}
        for value, option in selection.encoded.items()
    )
    repeatable = (record.operators[number].refusal is None for number in selection.repeated)
    return all(offered) and all(repeatable)


def _undominated(found: list[_Candidate]) -> tuple[ValueSelection, ...]:
    """Without those that another one beats in time, on the host and in memory."""
    costs = {
        (one.load.device_ns, one.load.host_ns, one.peak_bytes, one.memory.saved_bytes): one
        for one in found
    }
    return tuple(
        one.selection
        for cost, one in costs.items()
        if not any(
            other != cost and all(a <= b for a, b in zip(other, cost, strict=True))
            for other in costs
        )
    )


@dataclass(frozen=True, slots=True)
class _PeakLimit:
    """None: no limit. The step's peak is backward's where no more is known."""

    step_bytes: int | None
    backward_bytes: int | None

    def allows(self, one: _Candidate) -> bool:
        in_step = self.step_bytes is None or one.peak_bytes <= self.step_bytes
        return in_step and (
            self.backward_bytes is None or one.memory.peak_bytes <= self.backward_bytes
        )

    def missed(self, one: _Candidate, *, timed: bool) -> str:
        if self.step_bytes is not None and one.peak_bytes > self.step_bytes:
            most, least = self.step_bytes, one.peak_bytes
        else:
            most, least = self.backward_bytes or 0, one.memory.peak_bytes
        within = " within the time allowed" if timed else ""
        return f"The target of {size(most)} is out of reach. The least is {size(least)}{within}."


def _limit(
    record: StepRecord, target: MemoryTarget, plain: _Candidate, around: StepMemory | None
) -> _PeakLimit | None:
    """A larger batch has to fit into the budget, else into the device, else into what the batch
    needs now."""
    step_bytes, backward_bytes = target.budget_bytes, None
    if target.reduce is not None:
        backward_bytes = int(plain.memory.peak_bytes * (1 - target.reduce))
    if target.batch is not None and target.budget_bytes is None:
        facts = record.surroundings
        if facts is not None and facts.limit_bytes is not None:
            step_bytes = facts.usable_bytes(facts.limit_bytes)
        elif around is not None:
            step_bytes = around.peak_bytes(plain.memory)
        else:
            step_bytes = plain.memory.peak_bytes
    if step_bytes is None and backward_bytes is None:
        return None
    return _PeakLimit(step_bytes, backward_bytes)


def _why_nothing(
    plain: _Candidate, limit: _PeakLimit | None, found: list[_Candidate], target: MemoryTarget
) -> str:
    if limit is not None and limit.step_bytes is not None and limit.allows(plain):
        return f"The step fits as it is: {size(plain.peak_bytes)} of {size(limit.step_bytes)}."
    worthwhile = [one for one in found if _is_worthwhile(one, plain)]
    if worthwhile and target.max_slowdown is not None:
        cheapest = min(worthwhile, key=lambda one: one.extra_ns)
        return (
            f"Nothing is worth it within {percent(target.max_slowdown)} of a step. To save "
            f"{size(plain.memory.peak_bytes - cheapest.memory.peak_bytes)} would take "
            f"{duration(cheapest.extra_ns)}."
        )
    if any(one.memory.saved_bytes <= _WORTH * plain.memory.saved_bytes for one in found):
        return (
            "Less could be saved for backward, but the peak would stay the same: a few "
            "layers are recomputed almost at the same time."
        )
    return "Nothing here is cheap to recompute or compresses exactly."


def _why_no_more(share: float, target: MemoryTarget, *, held_back: bool) -> str:
    """`held_back`: there is more to save, but the host could not follow."""
    more = (
        ""
        if target.heavy
        else " heavy=True also repeats matmuls and convolutions, which may save more."
    )
    why = "nothing else that is cheap to recompute lowers the peak."
    if held_back:
        why = "saving more would need more CPU time than is free."
    return (
        f"Recomputing takes {percent(share)} of a step, less than the "
        f"{percent(target.max_slowdown or 0.0)} allowed: {why}{more}"
    )


def _is_worthwhile(one: _Candidate, plain: _Candidate) -> bool:
    return one.memory.peak_bytes <= _WORTH * plain.memory.peak_bytes


def _candidate(
    record: StepRecord, selection: ValueSelection, around: StepMemory | None, batch: float
) -> _Candidate:
    replaced = sum(
        planned_action(record, selection, number, use) != KEEP
        for number, use in enumerate(record.uses)
    )
    load = plan_load(record, selection, replaced)
    memory = backward_memory(record, selection)
    if around is not None:
        peak_bytes = around.peak_bytes(memory, batch)
    else:
        peak_bytes = round(batch * memory.peak_bytes)
    # What it adds to a step. The host's part comes on top on CPUs; a GPU's work hides it.
    device_ns = round(record.dearer * load.device_ns)
    return _Candidate(
        selection,
        memory,
        load,
        (device_ns + load.host_ns if record.on_host else device_ns),
        peak_bytes,
    )


def _host_late_ns(record: StepRecord, load: PlanLoad) -> int:
    """0 where it is not known how far the host is ahead."""
    slack_ns = record.host_slack_ns
    return 0 if record.on_host or slack_ns is None else max(0, load.host_ns - slack_ns)


def _best(timely: list[_Candidate], limit: _PeakLimit | None, *, timed: bool) -> _Candidate:
    """The least bytes, or the least time that meets the bytes."""
    fitting = [one for one in timely if limit is not None and limit.allows(one)]
    if fitting:
        return min(fitting, key=lambda one: (one.extra_ns, one.peak_bytes))
    least = min(timely, key=_memory_first)
    if not timed:
        return least
    # The time is given: of plans with hardly another peak, that which keeps least.
    equal = [one for one in timely if one.peak_bytes <= _SAME_PEAK * least.peak_bytes]
    return min(equal, key=lambda one: (one.memory.saved_bytes, one.extra_ns))


def _memory_first(one: _Candidate) -> tuple[int, ...]:
    """Of equal ones, that which does least: times vary from run to run."""
    done = one.selection.repeated, one.selection.encoded, one.selection.encoded_uses
    return one.peak_bytes, one.memory.peak_bytes, sum(map(len, done)), one.extra_ns


def _advice(record: StepRecord, peak_bytes: int, needed_bytes: int) -> Iterator[str]:
    """`peak_bytes` of what backward keeps without a plan; `needed_bytes` by a step with it."""
    around = record.surroundings
    limit_bytes = None if around is None or around.expandable else around.limit_bytes
    if limit_bytes is not None and needed_bytes > _NEAR_LIMIT * limit_bytes:
        yield (
            f"A step needs {size(needed_bytes)} of {size(limit_bytes)}, and fragmentation "
            "needs some, too. Start the training with "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid most fragmentation."
        )
    owned = sum(value.size_bytes for value in record.values if value.owned)
    if owned > _WEIGHTS_DOMINATE * peak_bytes:
        share = percent(peak_bytes / (owned + peak_bytes))
        yield (
            f"Weights dominate: what is saved for backward is only {share} of both. Sharding "
            "(FSDP, ZeRO) saves more."
        )


def _plan(
    record: StepRecord,
    target: MemoryTarget,
    plain: _Candidate,
    chosen: _Candidate,
    around: StepMemory | None,
    notes: tuple[str, ...],
) -> SavePlan:
    selection = with_points(record, chosen.selection)
    return SavePlan(
        operators=tuple(call.name for call in record.operators),
        repeated=tuple(repeats(record, selection)),
        results=tuple(results(record, selection)),
        uses=tuple(
            planned_use(record, selection, number, use) for number, use in enumerate(record.uses)
        ),
        rows=tuple(rows(record, selection)),
        saved_bytes_before=plain.memory.saved_bytes,
        saved_bytes=chosen.memory.saved_bytes,
        peak_bytes_before=plain.memory.peak_bytes,
        peak_bytes=chosen.memory.peak_bytes,
        extra_ns=chosen.extra_ns,
        step_ns=record.step_ns,
        target=target.text,
        step_peak_bytes_before=None if around is None else around.peak_bytes(plain.memory),
        step_peak_bytes=None if around is None else around.peak_bytes(chosen.memory),
        timeline=plan_timeline(
            record, plain.memory, selection, chosen.memory, use_action(record, selection)
        ),
        notes=notes,
    )


# Which selections are worth comparing: segments first, then prices of time, then what lies between
# two prices where the target runs through.

_MOST_SEGMENTS = 64
_LEAST_IN_SEGMENT = 8  # operators
_PRICES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # times the step's bytes for the step's time
_NEVER = 1e6  # bytes for a nanosecond: nothing is worth that
_ENDS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the operators
_HALVINGS = 4
_PARTS = 6  # a limit is met to a 64th of the operators
_SHARES = (0.02, 0.05, 0.1, 0.2)  # of a step: times that are looked at
_PRICED_SEGMENTS = 3  # segmentations that are tried at every price
_MOST_OPERATORS = 4000  # beyond, one segmentation is: a cut takes seconds


class Scored(Protocol):
    """A selection that was worked out."""

    @property
    def peak_bytes(self) -> int: ...

    @property
    def extra_ns(self) -> int: ...

    @property
    def load(self) -> PlanLoad: ...


C = TypeVar("C", bound=Scored)


def search(
    record: StepRecord,
    score: Callable[[ValueSelection], C],
    *,
    fits: Callable[[C], bool] | None,
    most_ns: float | None,
) -> list[C]:
    """Selections that may be the best for a limit of memory, of the added time, or both."""
    by_segments = _segmentations(record, score)
    large = len(record.operators) > _MOST_OPERATORS
    priced = sorted(by_segments, key=lambda segments: by_segments[segments].peak_bytes)
    found = list(by_segments.values())
    for segments in priced[: 1 if large else _PRICED_SEGMENTS]:
        found += _priced(record, score, segments, by_segments[segments], fits, most_ns)
    return found


def _segmentations(record: StepRecord, score: Callable[[ValueSelection], C]) -> dict[int, C]:
    segments, scored = 1, {}
    while segments <= min(_MOST_SEGMENTS, max(1, len(record.operators) // _LEAST_IN_SEGMENT)):
        scored[segments] = score(select(record, bytes_per_ns=0, segments=segments))
        segments *= 2
    return scored


def _priced(
    record: StepRecord,
    score: Callable[[ValueSelection], C],
    segments: int,
    free: C,
    fits: Callable[[C], bool] | None,
    most_ns: float | None,
) -> list[C]:
    """At rising prices less is recomputed; between two that a limit separates, look closer."""
    saved_bytes = sum(record.values[v].size_bytes for v in keep_everything(record).kept)
    pace = saved_bytes / max(1, record.forward_ns)

    @functools.cache
    def at(price: float, late: tuple[int, float] | None = None) -> C:
        late = None if late is None else (late[0], late[1] * pace)
        return score(select(record, bytes_per_ns=price * pace, segments=segments, late=late))

    rising = [(0.0, free), *((price, at(price)) for price in _PRICES)]
    found = [one for _, one in rising]
    if fits is None and most_ns is None:
        found += [_one_end(record, score, segments, part) for part in _ENDS]
    for beyond in _limits(record, fits, most_ns):
        for (low, below), (high, above) in itertools.pairwise(rising):
            if beyond(above) and not beyond(below):
                found += _between(at, low, high, len(record.operators), beyond)
                break
    return found


def _limits(
    record: StepRecord, fits: Callable[[C], bool] | None, most_ns: float | None
) -> list[Callable[[C], bool]]:
    """Also the same shorter times for everybody: where much is made again at once, what takes
    longer may need more, and who allows more time is to get no worse plan. Once steps have shown
    what the host can take, these were looked at before."""
    limits: list[Callable[[C], bool]] = []
    if most_ns is not None:
        times = [share * record.step_ns for share in _SHARES if record.most_host_ns is None]
        shorter = [time_ns for time_ns in times if time_ns < most_ns]
        limits += [
            functools.partial(is_timely, time_ns, record.most_host_ns)
            for time_ns in (*shorter, most_ns)
        ]
    if fits is not None:
        limits.append(lambda one: not fits(one))
    return limits


def is_timely(most_ns: float | None, most_host_ns: int | None, one: Scored) -> bool:
    in_time = most_ns is None or one.extra_ns <= most_ns
    return in_time and (most_host_ns is None or one.load.host_ns <= most_host_ns)


def _one_end(
    record: StepRecord, score: Callable[[ValueSelection], C], segments: int, part: float
) -> C:
    """Recompute at the end of the pass only: what is made again for its beginning is there when
    backward has freed most, and may be a peak of its own. Times do not matter here, so the least
    memory is the least on a busy machine, too."""
    late = (round(part * len(record.operators)), 0.0)
    return score(select(record, bytes_per_ns=_NEVER, segments=segments, late=late))


def _between(
    at: Callable[..., C], low: float, high: float, operators: int, beyond: Callable[[C], bool]
) -> list[C]:
    """First prices between two. Then two prices at once: the lower for early operators, whose
    values stay longest, the higher for late ones. Near the price at which all or nothing is worth
    it, a few layers may not pay for what they have in common, and what was paid for makes all the
    others worth it: the first two prices are tried, too."""
    found, first = [], (low, high)
    for _ in range(_HALVINGS if low else 0):
        middle = math.sqrt(low * high)
        found.append(at(middle))
        low, high = (low, middle) if beyond(found[-1]) else (middle, high)
    for early_price, late_price in dict.fromkeys(((low, high), first)):
        none, every = 0, operators
        while every - none > max(1, operators >> _PARTS):
            late = (none + every) // 2
            found.append(at(early_price, (late, late_price)))
            none, every = (late, every) if beyond(found[-1]) else (none, late)
    return found


# The same pass at other costs, for the search.
#
# Bytes that an operator moves are the same on every machine and at every load: where no target
# limits time, measured times would only make the search look elsewhere each time. What the host has
# to do counts for nothing where the device's work hides it.


def with_byte_costs(record: StepRecord) -> StepRecord:
    """The same pass: every time is a number of bytes, and following a plan costs nothing."""
    return replace(
        record,
        operators=tuple(_moving(record, call) for call in record.operators),
        values=tuple(
            replace(value, options=_at_cost(value.options, value.size_bytes))
            for value in record.values
        ),
        uses=tuple(_read_for_bytes(record, use) for use in record.uses),
        watch_ns=0,
        replace_ns=0,
        repeat_ns=0,
        launch_ns=0,
        measured_step_ns=None,
    )


def with_hidden_host(record: StepRecord, *, copies: bool) -> StepRecord:
    """The same pass: only the device's time counts. If `copies`, one to host memory takes none."""
    values = record.values
    if copies:
        values = tuple(
            replace(value, options=tuple(map(_without_host, value.options))) for value in values
        )
    return replace(record, values=values, watch_ns=0, replace_ns=0, repeat_ns=0, launch_ns=0)


def _without_host(option: HoldingOption) -> HoldingOption:
    return replace(option, cost_ns=0) if option.encoding == OFFLOAD else option


def with_measured_costs(record: StepRecord, selection: ValueSelection) -> ValueSelection:
    """The same selection, with the options of the record itself."""
    return ValueSelection(
        kept=selection.kept,
        encoded={
            value: _same_encoding(record.values[value].options, option)
            for value, option in selection.encoded.items()
        },
        repeated=selection.repeated,
        encoded_uses={
            use: _same_encoding(record.uses[use].options, option)
            for use, option in selection.encoded_uses.items()
        },
    )


def _moving(record: StepRecord, call: RecordedCall) -> RecordedCall:
    moved = sum(record.values[value].size_bytes for value in (*call.inputs, *call.outputs))
    return replace(call, took_ns=moved, cheaper_ns=None)


def _read_for_bytes(record: StepRecord, use: SavedUse) -> SavedUse:
    size_bytes = 0 if use.value is None else record.values[use.value].size_bytes
    return replace(use, options=_at_cost(use.options, size_bytes))


def _at_cost(options: tuple[HoldingOption, ...], cost: int) -> tuple[HoldingOption, ...]:
    return tuple(replace(option, cost_ns=cost) for option in options)


def _same_encoding(options: tuple[HoldingOption, ...], wanted: HoldingOption) -> HoldingOption:
    return next(one for one in options if one.encoding == wanted.encoding)
