"""A bench against saved results: how far each workload's step is from the base's, and how sure."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.records.comparison import PartChange  # noqa: TC001  (decoded at run time)

ChangeVerdict = Literal["slower", "faster", "no difference seen", "not comparable"]


class StepPartChange(msgspec.Struct, frozen=True, kw_only=True):
    """How long the step computes, or waits of its own accord, beside the base."""

    base_ms: float
    now_ms: float
    change: float  # of waiting, as a share of the step; of computing, as a share of itself
    low: float
    high: float
    smallest_detectable: float  # the change that is found in 4 of 5 cases


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
    waiting: StepPartChange | None = None  # None: not captured on both sides
    computing: StepPartChange | None = None  # without the machine's own pace, where that is known
    base_others: float | None = None  # share of the step in which other programs had the cores
    now_others: float | None = None
    # What made the verdict: the whole step, or waiting, with computing where that surely changed.
    decided_by: Literal["step", "waiting"] = "step"
    counted_change: float | None = None  # of the step, by what decided
    counted_low: float | None = None
    counted_high: float | None = None
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
