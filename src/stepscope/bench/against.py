"""A bench against saved results: for each workload the change, its interval, what moved, and
whether the step waits longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from stepscope.bench.results import (
    BenchComparison,
    BenchMachine,
    BenchResults,
    ChangeVerdict,
    StepPartChange,
    WorkloadChange,
    WorkloadResult,
)
from stepscope.bench.run_change import (
    computing_kinds,
    has_parts,
    is_paced,
    kinds_change,
    others_explain,
    others_share,
    plain_runs,
    run_change,
    run_difference,
    run_values,
    smallest_with_runs,
    step_kinds,
    typical_ms,
    usual_variance,
)
from stepscope.records.comparison import PartChange
from stepscope.text.figures import unsigned_percent
from stepscope.verify.change import CONFIDENCE, POWER, Estimate

if TYPE_CHECKING:
    from stepscope.bench.run_change import RunPair

# Only what was measured alike is compared: the same size, settings, remedies and ranks, on a
# machine of the same kind. Anything else is listed as not comparable, with the reason.

# Another one of these makes another machine; another one of the rest is only said.
_MACHINE_IS = ("processor", "cores", "device", "devices")
_MACHINE_HAS = ("host", "torch", "cuda", "python")
_WORTH_SAYING = 0.02  # of the machine's own pace, beside a change that does not contain it
_SEEN_ELSEWHERE = {"runs", "dropped", "interleaved"}  # rules that each row's counts show


def compare_results(base: BenchResults, now: BenchResults, against: str) -> BenchComparison:
    """Every workload of `now` with its like in `base`; `against` is where the base was read."""
    other = other_machine(base.machine, now.machine)
    if not same_software(base.machine, now.machine):
        base, now = _without_pace(base), _without_pace(now)
    pairs = [(row_of_base(result, base.workloads), result) for result in now.workloads]
    reasons = [other or why_not_comparable(then, result) for then, result in pairs]
    alike = [
        (then, result)
        for (then, result), why in zip(pairs, reasons, strict=True)
        if then is not None and why is None
    ]
    noise = usual_variance([step_kinds(*pair)[0] for pair in alike])
    comparisons = sum(count_comparisons(*pair) for pair in alike)
    changes = tuple(
        _change(then, result, comparisons, noise)
        if then is not None and why is None
        else _not_comparable(result, why or "")
        for (then, result), why in zip(pairs, reasons, strict=True)
    )
    names = {result.name for result in now.workloads}
    return BenchComparison(
        against=against,
        base_started_unix=base.started_unix,
        confidence=CONFIDENCE,
        workloads=changes,
        not_run=tuple(dict.fromkeys(r.name for r in base.workloads if r.name not in names)),
        notes=tuple(_notes(base, now)),
    )


def count_comparisons(then: WorkloadResult, now: WorkloadResult) -> int:
    """The whole step, and how long it waits where that is known."""
    return 2 if has_parts(then, now) else 1


def slower_by(comparison: BenchComparison, share: float) -> tuple[WorkloadChange, ...]:
    """Workloads that are surely slower, and by more than `share` as measured, while the machine is
    not."""
    return tuple(row for row in _slow_rows(comparison, share) if not _is_the_machines(row))


def slower_with_machine(comparison: BenchComparison, share: float) -> tuple[WorkloadChange, ...]:
    """Workloads that are slower on a machine that became as much slower itself."""
    return tuple(row for row in _slow_rows(comparison, share) if _is_the_machines(row))


def _slow_rows(comparison: BenchComparison, share: float) -> Iterator[WorkloadChange]:
    for row in comparison.workloads:
        if row.verdict == "slower" and (row.counted_change or 0.0) > share:
            yield row


def _is_the_machines(row: WorkloadChange) -> bool:
    """No machine's pace makes a step wait of its own accord."""
    return row.machine_changed and row.decided_by == "step"


def moved_part(change: WorkloadChange) -> PartChange | None:
    """The part of the budget that changed most in the step's own direction."""
    direction = change.change or 0.0
    return next((part for part in change.parts if part.change_ms * direction > 0), None)


def row_of_base(result: WorkloadResult, base: Sequence[WorkloadResult]) -> WorkloadResult | None:
    """The base's row of this workload that has most in common with it."""
    same = [then for then in base if then.name == result.name]
    return max(same, key=lambda then: -len(list(_unlike(then, result))), default=None)


def why_not_comparable(then: WorkloadResult | None, now: WorkloadResult) -> str | None:
    if then is None:
        return "the base has no such workload"
    for side, result in (("the base's", then), ("this", now)):
        if result.status != "measured" or not result.runs_ms:
            return f"{side} run {'failed' if result.status == 'failed' else 'was not measured'}" + (
                f": {result.why}" if result.why else ""
            )
    unlike = "; ".join(_unlike(then, now))
    if not unlike and len(then.runs_ms) == len(now.runs_ms) == 1:
        return (
            "there is one run on each side, and two starts of one command differ. Run it again "
            "with --runs 5"
        )
    return unlike or None


def _unlike(then: WorkloadResult, now: WorkloadResult) -> Iterator[str]:
    if then.size != now.size:
        yield f"size {now.size}, the base {then.size}"
    if then.ranks != now.ranks:
        yield f"ranks {now.ranks}, the base {then.ranks}"
    if sorted(then.remedies) != sorted(now.remedies):
        yield f"with {_listed(now.remedies)}, the base with {_listed(then.remedies)}"
    for name in dict.fromkeys((*now.settings, *then.settings)):
        before, after = then.settings.get(name), now.settings.get(name)
        if before != after:
            yield f"{name} {_said(after)}, the base {_said(before)}"


def other_machine(base: BenchMachine | None, now: BenchMachine | None) -> str | None:
    if base is None or now is None:
        return None
    unlike = _differences(base, now, _MACHINE_IS)
    return f"another machine: {'; '.join(unlike)}" if unlike else None


def _differences(base: BenchMachine, now: BenchMachine, names: Sequence[str]) -> list[str]:
    values = {name: (getattr(base, name), getattr(now, name)) for name in names}
    return [
        f"{name} {_said(after)}, the base's {_said(before)}"
        for name, (before, after) in values.items()
        if before != after
    ]


def _change(
    then: WorkloadResult, now: WorkloadResult, comparisons: int, noise: float | None
) -> WorkloadChange:
    kinds = step_kinds(then, now)
    estimate = kinds_change(kinds, comparisons=comparisons, usual_variance=noise)
    if estimate is None:
        return _not_comparable(now, "too few runs")
    base_ms, now_ms = (typical_ms(side) for side in plain_runs(then, now))
    paced = is_paced(then, now)
    pace = None if paced else _pace(then, now)
    own = math.log(now_ms / base_ms) - estimate.value  # the machine's part of it
    split = part_changes(then, now, comparisons=comparisons)
    waits = split.together if split is not None and split.decide else None
    whole = relative(estimate)
    counted = waits or whole
    return WorkloadChange(
        name=now.name,
        size=now.size,
        ranks=now.ranks,
        remedies=now.remedies,
        verdict=_verdict(counted),
        base_ms=base_ms,
        now_ms=now_ms,
        change=whole.value,
        low=whole.low,
        high=whole.high,
        smallest_detectable=whole.smallest,
        base_runs=len(kinds[-1][0]),
        now_runs=len(kinds[-1][1]),
        parts=_parts(then.budget_ms, now.budget_ms),
        waiting=split.waiting if split else None,
        computing=split.computing if split else None,
        decided_by="waiting" if waits else "step",
        base_others=others_share(then) if split else None,
        now_others=others_share(now) if split else None,
        counted_change=counted.value,
        counted_low=counted.low,
        counted_high=counted.high,
        paced=paced,
        machine_changed=not paced
        and (_explains(pace, estimate) or others_explain(then, now, estimate)),
        pace_change=math.expm1(own) if paced else math.expm1(pace.value) if pace else None,
        notes=_paced_notes(own) if paced else _pace_notes(estimate, pace),
    )


def same_software(base: BenchMachine | None, now: BenchMachine | None) -> bool:
    """Whether the yardstick is the same on both sides: another torch may have another pace, and
    that is a change like any other."""
    if base is None or now is None:
        return False
    return (base.torch, base.python) == (now.torch, now.python)


def _without_pace(results: BenchResults) -> BenchResults:
    rows = tuple(replace(row, paced=(), paced_computing=()) for row in results.workloads)
    return replace(results, workloads=rows)


def _not_comparable(now: WorkloadResult, why: str) -> WorkloadChange:
    return WorkloadChange(
        name=now.name,
        size=now.size,
        ranks=now.ranks,
        remedies=now.remedies,
        verdict="not comparable",
        why=why,
        now_runs=len(now.runs_ms),
    )


def _verdict(change: Estimate) -> ChangeVerdict:
    if change.high < 0:
        return "faster"
    return "slower" if change.low > 0 else "no difference seen"


def _parts(base: Mapping[str, float], now: Mapping[str, float]) -> tuple[PartChange, ...]:
    if not base or not now:
        return ()
    rows = (
        PartChange(
            id=name,
            a_ms=base.get(name, 0.0),
            b_ms=now.get(name, 0.0),
            change_ms=now.get(name, 0.0) - base.get(name, 0.0),
        )
        for name in dict.fromkeys((*base, *now))
    )
    return tuple(sorted(rows, key=lambda row: -abs(row.change_ms)))


def _pace(then: WorkloadResult, now: WorkloadResult) -> Estimate | None:
    if not then.calibration_ms or not now.calibration_ms:
        return None
    return run_change(then.calibration_ms, now.calibration_ms)


def _explains(pace: Estimate | None, change: Estimate) -> bool:
    """Whether the machine surely changed in the step's own direction, and by as much."""
    if pace is None:
        return False
    if change.value > 0:
        return pace.low > 0 and pace.value >= change.value
    return pace.high < 0 and pace.value <= change.value


def _paced_notes(own: float) -> tuple[str, ...]:
    """Where plain runs say something else than runs beside a yardstick."""
    if abs(own) < _WORTH_SAYING:
        return ()
    size, way = unsigned_percent(math.expm1(own)), "slower" if own > 0 else "faster"
    return (
        f"the machine itself is {size} {way} than when the base was measured. This was "
        "measured with a reference load, timed in turns with the step. The change shown is "
        "what remains",
    )


def _pace_notes(change: Estimate, pace: Estimate | None) -> tuple[str, ...]:
    """Where the machine's own pace changed by as much as the workload's step."""
    if pace is None or abs(pace.value) < abs(change.value):
        return ()
    if _verdict(change) == "no difference seen" and pace.low <= 0 <= pace.high:
        return ()
    size, way = unsigned_percent(math.expm1(pace.value)), "longer" if pace.value > 0 else "shorter"
    return (
        f"the machine itself takes {size} {way} for fixed arithmetic than when the base was "
        "measured, and the step changed by less. Measure the base again, or run both "
        "versions in turns with stepscope ab",
    )


def _notes(base: BenchResults, now: BenchResults) -> Iterator[str]:
    if base.machine is None or now.machine is None:
        yield "one side does not say on which machine it was measured"
    else:
        yield from _differences(base.machine, now.machine, _MACHINE_HAS)
    for name in sorted({*base.rules} & {*now.rules} - _SEEN_ELSEWHERE):
        if base.rules[name] != now.rules[name]:
            yield f"rule {name}: {_said(now.rules[name])}, the base {_said(base.rules[name])}"
    yield from (f"the base: {broken}" for broken in base.broken_rules)


def _listed(remedies: Sequence[str]) -> str:
    return ", ".join(remedies) or "no change"


def _said(value: object) -> str:
    return "unknown" if value is None else str(value)


# Whether a step waits longer than the base's, however fast the processor is today.
#
# How long a step waits of its own accord does not depend on the processor's clock, nor on other
# programs (steps.py). So the difference is compared in milliseconds and given as a
# share of today's step: its computing now, with the base's waiting. A longer wait is a slower step
# unless the step computes less for it.


class PartChanges(NamedTuple):
    """What the two parts did; `together` is what both mean for the step, as a share of it."""

    waiting: StepPartChange
    computing: StepPartChange
    together: Estimate

    @property
    def decide(self) -> bool:
        """Whether the wait surely changed, and computing did not make up for it."""
        waits = self.waiting
        sure = waits.low > 0 or waits.high < 0
        return sure and self.together.value * waits.change > 0 and _is_sure(self.together)


def part_changes(
    then: WorkloadResult, now: WorkloadResult, *, comparisons: int
) -> PartChanges | None:
    """None where a side was not taken apart."""
    if not has_parts(then, now):
        return None
    computing_ms = [typical_ms(row.computing_ms) for row in (then, now)]
    waiting_ms = [run_values(row.waiting_ms).mean for row in (then, now)]
    step_ms = computing_ms[1] + waiting_ms[0]
    waits = run_difference(then.waiting_ms, now.waiting_ms, step_ms, comparisons=comparisons)
    computes = _computing_change(then, now, comparisons)
    if waits is None or computes is None:
        return None
    return PartChanges(
        waiting=_part(waits, waiting_ms),
        computing=_part(relative(computes), computing_ms),
        together=_together(waits, computes, computing_ms[1], step_ms),
    )


def _computing_change(
    then: WorkloadResult, now: WorkloadResult, comparisons: int
) -> Estimate | None:
    """Not a sure one if other programs may have made it; a yardstick tells that."""
    change = kinds_change(computing_kinds(then, now), comparisons=comparisons)
    if change is None or is_paced(then, now) or not others_explain(then, now, change):
        return change
    return msgspec.structs.replace(change, low=min(change.low, 0.0), high=max(change.high, 0.0))


def _together(waits: Estimate, computes: Estimate, computing_ms: float, step_ms: float) -> Estimate:
    """Computing counts only where it surely changed. The step it is a share of is today's, as the
    base's program would take it."""
    if not _is_sure(computes):
        return waits
    like_base_ms = computing_ms * (math.exp(-computes.value) - 1) + step_ms
    waits_scale = step_ms / like_base_ms
    computes_scale = (like_base_ms - (step_ms - computing_ms)) / like_base_ms
    value = waits.value * waits_scale + math.expm1(computes.value) * computes_scale
    reach = math.hypot(_reach(waits) * waits_scale, _reach(computes) * computes_scale)
    return Estimate(value=value, low=value - reach, high=value + reach, smallest=waits.smallest)


def _reach(change: Estimate) -> float:
    return max(change.high - change.value, change.value - change.low)


def _is_sure(change: Estimate) -> bool:
    return change.low > 0 or change.high < 0


def relative(change: Estimate) -> Estimate:
    """Shares instead of logarithms."""
    return Estimate(
        value=math.expm1(change.value),
        low=math.expm1(change.low),
        high=math.expm1(min(change.high, 700.0)),
        smallest=math.expm1(min(change.smallest, 700.0)),
    )


def _part(change: Estimate, base_and_now_ms: Sequence[float]) -> StepPartChange:
    base_ms, now_ms = base_and_now_ms
    return StepPartChange(
        base_ms=base_ms,
        now_ms=now_ms,
        change=change.value,
        low=change.low,
        high=change.high,
        smallest_detectable=change.smallest,
    )


SEEN = 0.05  # a slow-down of this size
FOUND = 0.999  # is found so often
MOST_RUNS, MOST_OF_MANY = 30, 10  # of one workload; of each where there are more than _FEW
_FEW = 4
MOST_S = 120.0  # for all runs of a workload
_TIMES_BASE = 3  # as many runs as the base has: further ones leave the base's own doubt


class SmallestSeen(NamedTuple):
    """The smallest changes that these runs find in 4 of 5 cases, as shares of the step."""

    step: float
    waiting: float | None  # None: not captured


@dataclass(frozen=True, slots=True, kw_only=True)
class EnoughRuns:
    """The rule of one bench, alone or against `base`."""

    workloads: int
    base: BenchResults | None = None

    @property
    def most(self) -> int:
        return MOST_RUNS if self.workloads <= _FEW else MOST_OF_MANY

    def are_there(self, row: WorkloadResult) -> bool:
        """Whether this row needs no further run. Without a base, later runs are taken to differ as
        much, and to be as many."""
        then = self._base_row(row)
        if then is None or why_not_comparable(then, row):
            return True
        if self._waiting_decides(then, row):
            return True
        comparisons = self._comparisons(then, row)
        lacking = [
            pair for pair in step_kinds(then, row) if not sees(*pair, comparisons=comparisons)
        ]
        return not all(self._gets_there(row, pair, comparisons) for pair in lacking) or not lacking

    def _gets_there(self, row: WorkloadResult, pair: RunPair, comparisons: int) -> bool:
        """Whether further runs of this kind will see it in most cases, in the time that is left."""
        before, after = pair
        # Runs of the compared kind that there may be in the end.
        most = self.most
        if self.base is not None:
            most = min(most, _TIMES_BASE * len(before))
        if row.seconds:
            run_s = row.seconds / (len(row.runs_ms) + len(row.paced))
            most = min(most, len(after) + math.floor((MOST_S - row.seconds) / run_s))
        runs = most
        if runs <= len(after):
            return False
        both = (runs, runs) if self.base is None else (len(before), runs)
        smallest = smallest_with_runs(*pair, both, comparisons=comparisons, power=POWER)
        return smallest <= math.log1p(SEEN)

    def smallest_seen(self, row: WorkloadResult) -> SmallestSeen | None:
        """None where nothing can be compared."""
        then = self._base_row(row)
        if then is None or why_not_comparable(then, row):
            return None
        comparisons = self._comparisons(then, row)
        estimate = kinds_change(step_kinds(then, row), comparisons=comparisons)
        parts = part_changes(then, row, comparisons=comparisons)
        if estimate is None:
            return None
        waiting = parts.waiting.smallest_detectable if parts is not None else None
        return SmallestSeen(step=relative(estimate).smallest, waiting=waiting)

    def wants_paced(self, row: WorkloadResult) -> bool:
        """Whether a further run is to be beside a yardstick: the kind that is compared."""
        then = self._base_row(row)
        return then is not None and is_paced(then, row)

    def paces(self, row: WorkloadResult, machine: BenchMachine | None) -> bool:
        """Whether runs beside a yardstick help: on a processor, in one process, and if the base has
        them too. A GPU's own pace is steady, and a yardstick would make its host wait."""
        if machine is None or machine.device is not None or row.ranks > 1:
            return False
        if self.base is None:
            return True
        then = row_of_base(row, self.base.workloads)
        if then is None or not then.paced or not same_software(self.base.machine, machine):
            return False
        return not self._waiting_decides(then, row)

    def can_help(self, machine: BenchMachine | None) -> bool:
        """Runs on this machine; nothing is compared with a base of another one."""
        return self.base is None or not other_machine(self.base.machine, machine)

    def _base_row(self, row: WorkloadResult) -> WorkloadResult | None:
        return row_of_base(row, self.base.workloads) if self.base is not None else row

    def _comparisons(self, then: WorkloadResult, row: WorkloadResult) -> int:
        return self.workloads * count_comparisons(then, row)

    def _waiting_decides(self, then: WorkloadResult, row: WorkloadResult) -> bool:
        if why_not_comparable(then, row):
            return False
        parts = part_changes(then, row, comparisons=self._comparisons(then, row))
        return self.base is not None and parts is not None and parts.decide


def sees(base: Sequence[float], now: Sequence[float], *, comparisons: int) -> bool:
    """Whether a change of SEEN would be found between such runs."""
    estimate = run_change(base, now, comparisons=comparisons, power=FOUND)
    return estimate is not None and estimate.smallest <= math.log1p(SEEN)
