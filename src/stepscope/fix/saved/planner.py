"""Make the plan for a target: compare selections by their peak and their time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from stepscope.fix.saved.memory_model import BackwardMemory, BackwardModel, StepMemory, step_memory
from stepscope.fix.saved.save_plan import (
    SavePlan,
    plan_timeline,
    planned_use,
    repeats,
    results,
    rows,
)
from stepscope.fix.saved.selection import (
    StepCuts,
    ValueSelection,
    keep_everything,
    moved_bytes,
)
from stepscope.fix.saved.step_record import StepRecord, is_lossy
from stepscope.records.change_values import MemoryTarget
from stepscope.text.figures import duration, percent, size

_WORTH = 0.98  # of the peak: less saved is not worth a plan
_SAME_PEAK = 1.005
_WEIGHTS_DOMINATE = 4
_LITTLE = 0.6  # of the time allowed
_NEAR_LIMIT = 0.8  # of the device's memory
_MUCH_HOST = 0.02  # of a step: so much work of the CPU's is worth a note

# What is compared: segments of the pass, prices of time, and places in the pass where one price
# ends and another begins.
_LEAST_IN_SEGMENT, _MOST_SEGMENTS = 4, 64  # operators
_LONGEST_SEGMENT = 256  # operators: longer ones take long to cut, and to make again
_LARGE = 1200  # operators: beyond, fewer selections are compared, so that planning takes 2 s
_PRICES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # times the step's bytes for the step's time
_NEVER = 1e6  # bytes for a nanosecond: nothing is worth that
_ENDS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the operators
_PARTS = 6  # a limit is met to a 64th of the operators
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of a step: who allows more gets no worse plan


@dataclass(frozen=True, slots=True)
class PlannedStep:
    plan: SavePlan
    meets_target: bool  # without a target of bytes, always
    read: bool  # its peaks rest on what the allocator held in the recorded step's backward
    host_ns: int = 0  # of the CPU, to follow it


@dataclass(frozen=True)
class _Candidate:
    """One selection. Its memory is worked out when it is asked for."""

    selection: ValueSelection
    extra_ns: int  # that a step takes longer
    host_ns: int
    work_out: Callable[[ValueSelection], tuple[BackwardMemory, int]]

    @functools.cached_property
    def _worked_out(self) -> tuple[BackwardMemory, int]:
        return self.work_out(self.selection)

    @property
    def memory(self) -> BackwardMemory:
        return self._worked_out[0]

    @property
    def peak_bytes(self) -> int:
        """That the target limits: of the step where it is known, else of backward."""
        return self._worked_out[1]


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


def make_plan(record: StepRecord, target: MemoryTarget) -> SavePlan:
    return plan_step(record, target).plan


def plan_step(record: StepRecord, target: MemoryTarget) -> PlannedStep:
    score = _scorer(record, target.batch or 1.0)
    plain = score(keep_everything(record))
    limit = _limit(record, target, plain)
    most_ns = target.most_ns(record.step_ns)
    fits = None if limit is None else limit.allows
    found = list(_searched(record, score, fits, most_ns))
    if any(call.heavy for call in record.operators):  # it may be best not to repeat them
        found += _searched(_without_heavy(record), score, fits, most_ns)
    timely = [one for one in found if most_ns is None or one.extra_ns <= most_ns]
    chosen = _best([plain, *timely], limit, timed=most_ns is not None)
    notes = []
    meets_target = limit is None or limit.allows(chosen)
    if limit is not None and not meets_target:
        notes.append(limit.missed(chosen, timed=most_ns is not None))
    if not _is_worthwhile(chosen, plain):
        chosen = plain
        notes.append(_why_nothing(plain, limit, found, target))
    elif limit is None and most_ns is not None and chosen.extra_ns < _LITTLE * most_ns:
        notes.append(_why_no_more(chosen.extra_ns / record.step_ns, target))
    if any(is_lossy(option.encoding) for option in chosen.selection.encoded.values()):
        notes.append("Some values are rounded (lossy), so results differ from plain training.")
    notes.extend(_advice(record, plain, chosen))
    return PlannedStep(
        plan=_plan(record, target, plain, chosen, tuple(notes)),
        meets_target=meets_target,
        read=bool(record.readings),
        host_ns=chosen.host_ns,
    )


def plan_nothing(record: StepRecord, target: MemoryTarget, note: str) -> PlannedStep:
    """Everything is kept."""
    plain = _scorer(record, target.batch or 1.0)(keep_everything(record))
    plan = _plan(record, target, plain, plain, (note,))
    return PlannedStep(plan=plan, meets_target=False, read=bool(record.readings))


def _without_heavy(record: StepRecord) -> StepRecord:
    calls = (replace(call, refusal="heavy") if call.heavy else call for call in record.operators)
    return replace(record, operators=tuple(calls))


def _scorer(record: StepRecord, batch: float) -> Callable[[ValueSelection], _Candidate]:
    model, around = BackwardModel(record), step_memory(record)

    def work_out(selection: ValueSelection) -> tuple[BackwardMemory, int]:
        memory = model.memory(selection)
        return memory, _peak_bytes(memory, around, batch)

    def score(selection: ValueSelection) -> _Candidate:
        host_ns = _host_ns(record, selection)
        device_ns = _device_ns(record, selection)
        extra_ns = round(record.dearer * device_ns) + max(0, host_ns - record.slack_ns)
        return _Candidate(selection, extra_ns, host_ns, work_out)

    return score


def _peak_bytes(memory: BackwardMemory, around: StepMemory | None, batch: float = 1.0) -> int:
    return round(batch * memory.peak_bytes) if around is None else around.peak_bytes(memory, batch)


def _device_ns(record: StepRecord, selection: ValueSelection) -> int:
    options = (*selection.encoded.values(), *selection.encoded_uses.values())
    repeated_ns = sum(record.operators[number].took_ns for number in selection.repeated)
    return repeated_ns + sum(option.cost_ns for option in options)


def _host_ns(record: StepRecord, selection: ValueSelection) -> int:
    """Following a plan takes the host longer, wherever it is a plan at all."""
    encodings = len(selection.encoded) + len(selection.encoded_uses)
    calls = len(selection.repeated) + (0 if record.on_host else encodings)
    if not encodings and not selection.repeated:
        return 0
    watched = len(record.operators) + len(record.uses)
    return record.watch_ns * watched + record.repeat_ns * calls


def _limit(record: StepRecord, target: MemoryTarget, plain: _Candidate) -> _PeakLimit | None:
    """A larger batch has to fit into the budget, else into the device, else into what the batch
    needs now."""
    step_bytes, backward_bytes = target.budget_bytes, None
    if target.reduce is not None:
        backward_bytes = int(plain.memory.peak_bytes * (1 - target.reduce))
    if target.batch is not None and target.budget_bytes is None:
        facts = record.surroundings
        step_bytes = _peak_bytes(plain.memory, step_memory(record))
        if facts is not None and facts.limit_bytes is not None:
            step_bytes = facts.usable_bytes(facts.limit_bytes)
    if step_bytes is None and backward_bytes is None:
        return None
    return _PeakLimit(step_bytes, backward_bytes)


def _searched(
    record: StepRecord,
    score: Callable[[ValueSelection], _Candidate],
    fits: Callable[[_Candidate], bool] | None,
    most_ns: float | None,
) -> Iterator[_Candidate]:
    """Selections that may be the best for a limit of memory, of the added time, or both."""
    count, by_bytes = len(record.operators), fits is None and most_ns is None
    free = [(cuts, score(cuts.select(0.0))) for cuts in _segmentations(record, by_bytes)]
    yield from (one for _, one in free)
    free.sort(key=lambda pair: pair[1].peak_bytes)
    saved_bytes = sum(record.values[v].size_bytes for v in keep_everything(record).kept)
    calls = record.operators
    work = sum(moved_bytes(record, call) if by_bytes else call.took_ns for call in calls)
    priced = [price * saved_bytes / max(1, work) for price in _PRICES]
    few = count > _LARGE or any(call.heavy for call in calls)
    for cuts, least in free[: 1 if few else 2]:
        at = functools.cache(lambda price, late=None, cuts=cuts: score(cuts.select(price, late)))
        rising = [(0.0, least), *((price, at(price)) for price in priced)]
        rising.append((_NEVER, at(_NEVER)))
        yield from (one for _, one in rising)
        if by_bytes:
            # Recompute at the end of the pass only: what is made again for its beginning is there
            # when backward has freed most, and may be a peak of its own.
            yield from (at(_NEVER, (round(part * count), 0.0)) for part in _ENDS)
        for beyond in _limits(record, fits, most_ns):
            for (low, below), (high, above) in pairwise(rising):
                if beyond(above) != beyond(below):
                    yield from _between(at, low, high, count, beyond)
                    break


def _segmentations(record: StepRecord, by_bytes: bool) -> Iterator[StepCuts]:
    count, segments = len(record.operators), 1
    while segments <= min(_MOST_SEGMENTS, max(1, count // _LEAST_IN_SEGMENT)):
        if count <= _LONGEST_SEGMENT * segments:
            yield StepCuts(record, segments, by_bytes=by_bytes)
        segments *= 4 if count > _LARGE else 2


def _limits(
    record: StepRecord, fits: Callable[[_Candidate], bool] | None, most_ns: float | None
) -> Iterator[Callable[[_Candidate], bool]]:
    if most_ns is not None:
        shorter = [share * record.step_ns for share in _SHARES if share * record.step_ns < most_ns]
        for limit_ns in (*shorter, most_ns):
            yield lambda one, limit_ns=limit_ns: one.extra_ns > limit_ns  # type: ignore[misc]
    if fits is not None:
        yield lambda one: not fits(one)


def _between(
    at: Callable[..., _Candidate],
    low: float,
    high: float,
    operators: int,
    beyond: Callable[[_Candidate], bool],
) -> Iterator[_Candidate]:
    """Two prices at once: one for early operators, whose values stay longest, the other for late
    ones. What is yielded is within the limit."""
    for early_price, late_price in ((low, high), (0.0, _NEVER)):
        none, every = 0, operators
        none_is_beyond = beyond(at(late_price))
        while every - none > max(1, operators >> _PARTS):
            late = (none + every) // 2
            if beyond(at(early_price, (late, late_price))) == none_is_beyond:
                none = late
            else:
                every = late
        yield at(early_price, (every if none_is_beyond else none, late_price))


def _is_worthwhile(one: _Candidate, plain: _Candidate) -> bool:
    return one.memory.peak_bytes <= _WORTH * plain.memory.peak_bytes


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


def _why_nothing(
    plain: _Candidate, limit: _PeakLimit | None, found: list[_Candidate], target: MemoryTarget
) -> str:
    if limit is not None and limit.step_bytes is not None and limit.allows(plain):
        return f"The step fits as it is: {size(plain.peak_bytes)} of {size(limit.step_bytes)}."
    worthwhile = [one for one in found if _is_worthwhile(one, plain)]
    if worthwhile and target.max_slowdown is not None:
        cheapest = min(worthwhile, key=lambda one: one.extra_ns)
        compiled = ""
        if 2 * cheapest.host_ns > cheapest.extra_ns:
            compiled = f" Most of that is CPU time: {_COMPILE}."
        return (
            f"Nothing is worth it within {percent(target.max_slowdown)} of a step. To save "
            f"{size(plain.memory.peak_bytes - cheapest.memory.peak_bytes)} would take "
            f"{duration(cheapest.extra_ns)}.{compiled}"
        )
    if any(one.memory.saved_bytes <= _WORTH * plain.memory.saved_bytes for one in found):
        return (
            "Less could be saved for backward, but the peak would stay the same: a few "
            "layers are recomputed almost at the same time."
        )
    return "Nothing here is cheap to recompute or compresses exactly."


_COMPILE = "save_memory(model, compile=True) needs none"


def _why_no_more(share: float, target: MemoryTarget) -> str:
    more = (
        ""
        if target.heavy
        else " heavy=True also repeats matmuls and convolutions, which may save more."
    )
    return (
        f"Recomputing takes {percent(share)} of a step, less than the "
        f"{percent(target.max_slowdown or 0.0)} allowed: nothing else that is cheap to "
        f"recompute lowers the peak.{more}"
    )


def _advice(record: StepRecord, plain: _Candidate, chosen: _Candidate) -> Iterator[str]:
    late_ns = chosen.host_ns - record.slack_ns
    if late_ns > _MUCH_HOST * record.step_ns:
        yield (
            f"Following the plan takes the CPU {duration(late_ns)} per step that nothing hides. "
            f"Where the model compiles, {_COMPILE}."
        )
    around = record.surroundings
    limit_bytes = None if around is None or around.expandable else around.limit_bytes
    if limit_bytes is not None and chosen.peak_bytes > _NEAR_LIMIT * limit_bytes:
        yield (
            f"A step needs {size(chosen.peak_bytes)} of {size(limit_bytes)}, and fragmentation "
            "needs some, too. Start the training with "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid most fragmentation."
        )
    owned, peak_bytes = sum(v.size_bytes for v in record.values if v.owned), plain.memory.peak_bytes
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
    notes: tuple[str, ...],
) -> SavePlan:
    selection, around = chosen.selection, step_memory(record)
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
        timeline=plan_timeline(record, plain.memory, selection, chosen.memory),
        notes=notes,
    )
