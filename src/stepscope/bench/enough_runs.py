"""How many runs a claim needs: until a slow-down of 5% would hardly be missed.

How much starts differ is known only from runs, and changes from hour to hour. So runs are added
while too few were made to tell, up to a limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.bench.against import (
    compared_runs,
    compares_paced,
    other_machine,
    row_of_base,
    same_software,
    why_not_comparable,
)
from stepscope.bench.run_change import run_change

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.bench_result import BenchMachine, BenchResults, WorkloadResult

SEEN = 0.05  # a slow-down of this size
FOUND = 0.999  # is found so often
MOST_RUNS, MOST_OF_MANY = 30, 10  # of one workload; of each where there are more than _FEW
_FEW = 4
_TIMES_BASE = 3  # as many runs as the base has: further ones leave the base's own doubt


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
        then = row_of_base(row, self.base.workloads) if self.base is not None else row
        if then is None or why_not_comparable(then, row):
            return True
        before, after = compared_runs(then, row)
        if len(after) >= self.most or self._outnumber(after, before):
            return True
        return sees(before, after, workloads=self.workloads)

    def wants_paced(self, row: WorkloadResult) -> bool:
        """Whether a further run is to be beside a yardstick: the kind that is compared."""
        then = row_of_base(row, self.base.workloads) if self.base is not None else row
        return then is not None and compares_paced(then, row)

    def paces(self, row: WorkloadResult, machine: BenchMachine | None) -> bool:
        """Whether runs beside a yardstick help: on a processor, in one process, and if the base has
        them too. A GPU's own pace is steady, and a yardstick would make its host wait."""
        if machine is None or machine.device is not None or row.ranks > 1:
            return False
        if self.base is None:
            return True
        then = row_of_base(row, self.base.workloads)
        return then is not None and bool(then.paced) and same_software(self.base.machine, machine)

    def can_help(self, machine: BenchMachine | None) -> bool:
        """Runs on this machine; nothing is compared with a base of another one."""
        return self.base is None or not other_machine(self.base.machine, machine)

    def _outnumber(self, after: Sequence[float], before: Sequence[float]) -> bool:
        return self.base is not None and len(after) >= _TIMES_BASE * len(before)


def sees(base: Sequence[float], now: Sequence[float], *, workloads: int) -> bool:
    """Whether a change of SEEN would be found between such runs."""
    estimate = run_change(base, now, comparisons=workloads, power=FOUND)
    return estimate is not None and estimate.smallest <= math.log1p(SEEN)
