"""A bench against saved results: how far each workload's step is from the base's, and how sure."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.records.comparison import PartChange  # noqa: TC001  (decoded at run time)

ChangeVerdict = Literal["slower", "faster", "no difference seen", "not comparable"]


class WorkloadChange(msgspec.Struct, frozen=True, kw_only=True):
    """One workload now against the base. Changes are shares of the base's step: 0.05 is slower."""

    name: str
    size: str
    ranks: int = 1
    remedies: tuple[str, ...] = ()
    verdict: ChangeVerdict
    why: str | None = None  # it is not comparable
    base_ms: float | None = None
    now_ms: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    smallest_detectable: float | None = None  # the change that is found in 4 of 5 cases
    base_runs: int = 0
    now_runs: int = 0
    parts: tuple[PartChange, ...] = ()  # of the budget, the largest change first; a is the base
    paced: bool = False  # measured beside a yardstick: the machine's own pace is not in the change
    machine_changed: bool = False  # surely, and by as much as the step did
    pace_change: float | None = None  # of the machine: now over then
    notes: tuple[str, ...] = ()


class BenchComparison(msgspec.Struct, frozen=True, kw_only=True):
    """All workloads of a bench against saved results."""

    against: str  # the file or the run folder
    base_started_unix: float
    confidence: float  # that all intervals together hold
    workloads: tuple[WorkloadChange, ...] = ()
    not_run: tuple[str, ...] = ()  # in the base only
    notes: tuple[str, ...] = ()
