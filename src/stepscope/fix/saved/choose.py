"""The plan for a target: many selections are compared by their peak and their time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stepscope.fix.saved.backward_memory import BackwardMemory, backward_memory
from stepscope.fix.saved.byte_costs import with_byte_costs, with_measured_costs
from stepscope.fix.saved.encoding_names import OFFLOAD, described, is_lossy
from stepscope.fix.saved.hook_pauses import HOOKED_FOR_EACH
from stepscope.fix.saved.offload_offers import offload_points
from stepscope.fix.saved.plan_search import search
from stepscope.fix.saved.plan_timeline import plan_timeline
from stepscope.fix.saved.save_plan import (
    ENCODE,
    KEEP,
    RECOMPUTE,
    PlannedRepeat,
    PlannedResult,
    PlannedUse,
    PlanRow,
    SavePlan,
)
from stepscope.fix.saved.selection import (
    ValueSelection,
    is_planned,
    keep_everything,
)
from stepscope.fix.saved.step_memory import StepMemory, step_memory
from stepscope.fix.saved.step_record import HoldingOption
from stepscope.records.figures import duration, percent, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepscope.fix.saved.step_record import SavedUse, StepRecord, StepValue
    from stepscope.records.memory_targets import MemoryTarget

_WORTH = 0.98  # of the peak: less saved is not worth a plan
_SAME_PEAK = 1.005
_WEIGHTS_DOMINATE = 4
_LEFT_FREE = 0.12  # of the device's memory: blocks are rounded up, and holes stay between them


@dataclass(frozen=True, slots=True)
class _Candidate:
    selection: ValueSelection
    memory: BackwardMemory
    extra_ns: int
    peak_bytes: int  # that the target limits: of the step where it is known, else of backward


@dataclass(frozen=True, slots=True)
class PlannedStep:
    plan: SavePlan
    meets_target: bool  # without a target of bytes, always
    read: bool  # its peaks rest on what the allocator held in the recorded step's backward


def make_plan(record: StepRecord, target: MemoryTarget) -> SavePlan:
    return plan_step(record, target).plan


def plan_step(record: StepRecord, target: MemoryTarget) -> PlannedStep:
    plain_memory = backward_memory(record, keep_everything(record))
    around = step_memory(record, plain_memory)
    batch = target.batch or 1.0

    def score(selection: ValueSelection) -> _Candidate:
        return _candidate(record, with_measured_costs(record, selection), around, batch)

    plain = score(keep_everything(record))
    limit = _limit(record, target, plain, around)
    most_ns = target.most_ns(record.step_ns)
    found = [
        one
        for searched in _searched(record, free=limit is None and most_ns is None)
        for one in search(
            searched, score, fits=None if limit is None else limit.allows, most_ns=most_ns
        )
    ]
    chosen = _best([plain, *found], limit, most_ns)
    notes = []
    meets_target = limit is None or limit.allows(chosen)
    if limit is not None and not meets_target:
        notes.append(limit.missed(chosen, timed=most_ns is not None))
    if not _is_worthwhile(chosen, plain):
        chosen = plain
        notes.append(_why_nothing(plain, limit, found, target))
    if any(is_lossy(option.encoding) for option in chosen.selection.encoded.values()):
        notes.append("Some values are rounded (lossy): results differ from plain training.")
    notes.extend(_advice(record, plain.memory.peak_bytes))
    return PlannedStep(
        plan=_plan(record, target, plain, chosen, around, tuple(notes)),
        meets_target=meets_target,
        read=record.backward_was_read,
    )


def _searched(record: StepRecord, *, free: bool) -> list[StepRecord]:
    """What selections are found in. Where a GPU hides a part of the host's costs, it may be best to
    count them or not; where heavy operators may be repeated, it may be best not to."""
    searched = [with_byte_costs(record) if free else record]
    if not free and not record.on_host and record.slack_ns is not None:
        searched.append(replace(record, watch_ns=0, replace_ns=0, repeat_ns=0))
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
        return f"The target of {size(most)} is out of reach: {size(least)} is the least{within}."


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
            step_bytes = int(facts.limit_bytes * (1 - _LEFT_FREE))
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
        return f"It fits as it is: {size(plain.peak_bytes)} of {size(limit.step_bytes)}."
    worthwhile = [one for one in found if _is_worthwhile(one, plain)]
    if worthwhile and target.max_slowdown is not None:
        cheapest = min(worthwhile, key=lambda one: one.extra_ns)
        return (
            f"Nothing is worth it within {percent(target.max_slowdown)} of a step: "
            f"{size(plain.memory.peak_bytes - cheapest.memory.peak_bytes)} less would take "
            f"{duration(cheapest.extra_ns)}."
        )
    if any(one.memory.saved_bytes <= _WORTH * plain.memory.saved_bytes for one in found):
        return (
            "Less could be kept, but the peak would stay: few layers are made again nearly at once."
        )
    return "Nothing here is cheap to recompute or compresses exactly."


def _is_worthwhile(one: _Candidate, plain: _Candidate) -> bool:
    return one.memory.peak_bytes <= _WORTH * plain.memory.peak_bytes


def _candidate(
    record: StepRecord, selection: ValueSelection, around: StepMemory | None, batch: float
) -> _Candidate:
    extra_ns = _extra_ns(record, selection)
    memory = backward_memory(record, selection)
    if around is not None:
        peak_bytes = around.peak_bytes(memory, batch)
    else:
        peak_bytes = round(batch * memory.peak_bytes)
    return _Candidate(selection, memory, extra_ns, peak_bytes)


def _extra_ns(record: StepRecord, selection: ValueSelection) -> int:
    """What the selection adds to a step. The host's part comes on top on CPUs; a GPU's work hides
    it, up to the slack."""
    repeated_ns = sum(record.operators[number].again_ns for number in selection.repeated)
    options = [*selection.encoded.values(), *selection.encoded_uses.values()]
    operators_ns = round(record.dearer * (repeated_ns + sum(one.cost_ns for one in options)))
    replaced = sum(
        _planned_action(record, selection, number, use) != KEEP
        for number, use in enumerate(record.uses)
    )
    following = host_ns(record, replaced, len(selection.repeated))
    if record.on_host:
        return operators_ns + following
    return max(operators_ns, 0 if record.slack_ns is None else following - record.slack_ns)


def host_ns(record: StepRecord, replaced: int, repeated: int) -> int:
    """What it costs the host to follow a plan with so many uses that are not kept, and operators
    that are repeated."""
    watched = min(len(record.uses), HOOKED_FOR_EACH * replaced)
    hooks_ns = record.watch_ns * watched + record.replace_ns * replaced
    return hooks_ns + record.repeat_ns * repeated


def _best(
    candidates: list[_Candidate], limit: _PeakLimit | None, most_ns: float | None
) -> _Candidate:
    """Within the time: the least bytes, or the least time that meets the bytes."""
    timely = [one for one in candidates if most_ns is None or one.extra_ns <= most_ns]
    fitting = [one for one in timely if limit is not None and limit.allows(one)]
    if fitting:
        return min(fitting, key=lambda one: (one.extra_ns, one.peak_bytes))
    least = min(timely, key=_memory_first)
    if most_ns is None:
        return least
    # The time is given: of plans with hardly another peak, that which keeps least.
    equal = [one for one in timely if one.peak_bytes <= _SAME_PEAK * least.peak_bytes]
    return min(equal, key=lambda one: (one.memory.saved_bytes, one.extra_ns))


def _memory_first(one: _Candidate) -> tuple[int, ...]:
    """Of equal ones, that which does least: times vary from run to run."""
    done = one.selection.repeated, one.selection.encoded, one.selection.encoded_uses
    return one.peak_bytes, one.memory.peak_bytes, sum(map(len, done)), one.extra_ns


def _advice(record: StepRecord, peak_bytes: int) -> Iterator[str]:
    owned = sum(value.size_bytes for value in record.values if value.owned)
    if owned > _WEIGHTS_DOMINATE * peak_bytes:
        share = percent(peak_bytes / (owned + peak_bytes))
        yield (
            f"The weights dominate: what backward keeps is only {share} of both. Sharding "
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
    selection = _with_points(record, chosen.selection)
    return SavePlan(
        operators=tuple(call.name for call in record.operators),
        repeated=tuple(_repeats(record, selection)),
        results=tuple(_results(record, selection)),
        uses=tuple(
            _planned_use(record, selection, number, use) for number, use in enumerate(record.uses)
        ),
        rows=tuple(_rows(record, selection)),
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
            record, plain.memory, selection, chosen.memory, _use_action(record, selection)
        ),
        notes=notes,
    )


def _with_points(record: StepRecord, selection: ValueSelection) -> ValueSelection:
    """Offloaded values, with the points at which they leave and come back."""
    offloaded = [v for v, option in selection.encoded.items() if option.encoding == OFFLOAD]
    encoded = dict(selection.encoded)
    for value, points in offload_points(record, offloaded).items():
        encoded[value] = replace(encoded[value], encoding=points.encoding())
    return replace(selection, encoded=encoded)


def _repeats(record: StepRecord, selection: ValueSelection) -> Iterator[PlannedRepeat]:
    for number in sorted(selection.repeated):
        call = record.operators[number]
        recomputed = tuple(_action(record, selection, value) == RECOMPUTE for value in call.inputs)
        yield PlannedRepeat(operator=number, recomputed_inputs=recomputed, again=call.again)


def _results(record: StepRecord, selection: ValueSelection) -> Iterator[PlannedResult]:
    for number in sorted(selection.encoded.keys() | selection.kept):
        value = record.values[number]
        option = selection.encoded.get(number)
        encoding = None if option is None else option.encoding
        repeated = value.producer in selection.repeated
        if value.producer is not None and (repeated or encoding is not None):
            slot = record.operators[value.producer].outputs.index(number)
            yield PlannedResult(operator=value.producer, slot=slot, encoding=encoding)


def _planned_use(
    record: StepRecord, selection: ValueSelection, number: int, use: SavedUse
) -> PlannedUse:
    action, encoding = _planned_action(record, selection, number, use), None
    if number in selection.encoded_uses:
        encoding = selection.encoded_uses[number].encoding
    elif action == ENCODE and use.value is not None:
        encoding = selection.encoded[use.value].encoding
    return PlannedUse(
        after=use.after, shape=use.shape, dtype=use.dtype, action=action, encoding=encoding
    )


def _planned_action(
    record: StepRecord, selection: ValueSelection, number: int, use: SavedUse
) -> str:
    if number in selection.encoded_uses:
        return ENCODE
    if use.value is None or not is_planned(record, use):
        return KEEP
    return _action(record, selection, use.value)


def _action(record: StepRecord, selection: ValueSelection, number: int) -> str:
    if number in selection.encoded:
        return ENCODE
    if number in selection.kept or record.values[number].producer not in selection.repeated:
        return KEEP
    return RECOMPUTE


def _shown_action(record: StepRecord, selection: ValueSelection, number: int) -> str:
    """For people: offloading is carried out as an encoding, but it is none."""
    option = selection.encoded.get(number)
    is_offloaded = option is not None and described(option.encoding) == OFFLOAD
    return OFFLOAD if is_offloaded else _action(record, selection, number)


def _use_action(record: StepRecord, selection: ValueSelection) -> Callable[[int], str]:
    """What is done with a value that backward kept; where only its uses are encoded, that."""
    whole = {
        use.value for number, use in enumerate(record.uses) if number not in selection.encoded_uses
    }
    return lambda value: _shown_action(record, selection, value) if value in whole else ENCODE


def _rows(record: StepRecord, selection: ValueSelection) -> Iterator[PlanRow]:
    """Every value that backward kept, and those that are now kept to start from."""
    encoded_uses = defaultdict[int, set[HoldingOption]](set)
    needed = selection.kept | selection.encoded.keys()
    for number, use in enumerate(record.uses):
        if use.value is not None and number not in selection.encoded_uses:
            needed.add(use.value)
        elif use.value is not None:
            encoded_uses[use.value].add(selection.encoded_uses[number])
    before = {use.value for use in record.uses}
    for number in sorted(needed | set(encoded_uses)):
        value = record.values[number]
        if value.owned:
            continue
        if number in needed:
            row = _row(record, value, *_treatment(record, selection, number))
        else:
            options = sorted(encoded_uses[number], key=lambda option: option.encoding)
            names = ", ".join(dict.fromkeys(described(option.encoding) for option in options))
            held_bytes = sum(option.held_bytes for option in options)
            cost_ns = sum(option.cost_ns for option in options)
            row = _row(record, value, f"{ENCODE}: {names}", held_bytes, cost_ns)
        yield replace(row, was_kept=number in before)


def _treatment(record: StepRecord, selection: ValueSelection, number: int) -> tuple[str, int, int]:
    """Action, bytes held and time."""
    value, action = record.values[number], _shown_action(record, selection, number)
    if action == RECOMPUTE and value.producer is not None:
        return action, 0, record.operators[value.producer].again_ns
    option = selection.encoded.get(number)
    if option is None:
        return action, value.size_bytes, 0
    label = f"{action}: {described(option.encoding)}" if action == ENCODE else action
    return label, option.held_bytes, option.cost_ns


def _row(
    record: StepRecord, value: StepValue, action: str, held_bytes: int, cost_ns: int
) -> PlanRow:
    shape = "x".join(map(str, value.shape)) or "scalar"
    made_by = "" if value.producer is None else record.operators[value.producer].name
    return PlanRow(
        value=f"{shape} {value.dtype}",
        module=value.module,
        operator=made_by.removeprefix("aten."),
        size_bytes=value.size_bytes,
        held_bytes=held_bytes,
        action=action,
        cost_ns=cost_ns,
    )
