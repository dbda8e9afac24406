"""How many runs a claim needs: until a slow-down of 5% would hardly be missed.

How much starts differ is known only from runs, and changes from hour to hour. So runs are added
while too few were made to tell, as long as the time for a workload lasts, and only if they get
there in that time. A longer wait is seen in the first few runs and asks for no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from stepscope.bench.against import (
    count_comparisons,
    other_machine,
    part_changes,
    relative,
    row_of_base,
    same_software,
    why_not_comparable,
)
from stepscope.bench.results import BenchMachine, BenchResults, WorkloadResult
from stepscope.bench.run_change import (
    is_paced,
    kinds_change,
    run_change,
    smallest_with_runs,
    step_kinds,
)
from stepscope.verify.change import POWER

if TYPE_CHECKING:
    from stepscope.bench.run_change import RunPair

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
