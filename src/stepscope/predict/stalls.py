"""Describe the stalls of the average step, by cause.

The run's mean step is its typical step plus these.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.budget import longer_work_ns
from stepscope.predict.fitted import fitted
from stepscope.records.normal import NORMAL_95
from stepscope.records.run import STALL_CAUSES, WITHOUT_GRADIENTS, RankRun, Stall
from stepscope.text.figures import milliseconds

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.step.graph import Floats

# What-ifs change the typical step, which the trace shows. Stalls are known from every step of the
# run and stay as they are, unless a what-if concerns their cause. Times are nanoseconds.

# The script stalls for these at the same step on every worker.
_BY_THE_SCRIPT = frozenset({*WITHOUT_GRADIENTS, "checkpoint", "compile"})
# Half of what independent stalls add, one standard deviation: they may partly coincide.
_COINCIDENCE_DOUBT = fitted("doubts.stalls_coincide")
# Of what a change makes of longer steps' work: other layers, another gain.
_WORK_DOUBT = fitted("doubts.stalls_work")
_LEAST_NAMED = 0.01  # of all stalls: a smaller part is not named
# The script does this every so many steps, often once for so many samples.
PER_SAMPLES = (*WITHOUT_GRADIENTS, "checkpoint")
_PER_PASS = ("data", "gc", "allocator", "operating_system", "unknown")


class StepStalls(msgspec.Struct, frozen=True, kw_only=True):
    """What stalls add to an average step, by cause."""

    cost_ns: dict[str, float]
    steps: int  # steady steps of the run
    excess_ns: dict[str, Floats]  # what each stalled step took longer, by main cause; sorted
    periodic: frozenset[str] = frozenset()  # causes whose stalls come every so many steps
    run_ns: float  # all of them, as the run had them
    deviation_ns: float  # of the run's mean step
    doubt_ns: float = 0.0  # about what changes made of them, one standard deviation
    work_share: float = 0.0  # of the unexplained ones: longer steps, which do more work

    @property
    def total_ns(self) -> float:
        return sum(self.cost_ns.values())

    @property
    def left(self) -> float:
        """The share of the run's stalls that is left; all of none."""
        return self.total_ns / self.run_ns if self.run_ns else 1.0

    @property
    def mean_doubt_ns(self) -> float:
        """Of the mean step, because of its stalls: one standard deviation."""
        return float(np.hypot(self.left * self.deviation_ns, self.doubt_ns))

    @property
    def least_ns(self) -> float:
        """The low end of what they add to a step."""
        return max(0.0, self.total_ns - NORMAL_95 * self.mean_doubt_ns)

    def without(self, causes: Collection[str]) -> StepStalls:
        """Longer steps keep their work."""
        left = {c: ns for c, ns in self.cost_ns.items() if c not in causes}
        if self.work_share and "unknown" in causes and "unknown" in self.cost_ns:
            left["unknown"] = self.work_share * self.cost_ns["unknown"]
            return replace(self, cost_ns=left, work_share=1.0)
        return replace(self, cost_ns=left)

    def scaled(self, causes: Collection[str], factor: float) -> StepStalls:
        """Stalls of these causes cost `factor` times as much per step."""
        cost = {c: ns * (factor if c in causes else 1.0) for c, ns in self.cost_ns.items()}
        return replace(self, cost_ns=cost)

    @property
    def unknown_ns(self) -> float:
        """What has no known cause: stalls, and work of longer steps."""
        return self.cost_ns.get("unknown", 0.0)

    def with_step(self, factor: float) -> StepStalls:
        """A typical step takes `factor` times as long: so does what longer steps do more."""
        before = self.unknown_ns
        if not self.work_share or not before:
            return self
        work = self.work_share * factor
        after = before * (1.0 - self.work_share + work)
        cost = {**self.cost_ns, "unknown": after}
        share = work * before / after if after else 0.0
        changed = replace(self, cost_ns=cost, work_share=share)
        return changed.plus_doubt(_WORK_DOUBT * abs(after - before))

    def by_count(self, causes: Collection[str]) -> float:
        """What those of these causes add to a step, in nanoseconds."""
        return sum(ns for cause, ns in self.cost_ns.items() if cause in causes)

    def plus_doubt(self, ns: float) -> StepStalls:
        return replace(self, doubt_ns=float(np.hypot(self.doubt_ns, ns)))


def find_stalls(run: RankRun | None) -> StepStalls | None:
    """None if the run's steps are not known."""
    if run is None or run.times is None:
        return None
    times = run.times
    return StepStalls(
        cost_ns={stall.cause: 1e6 * stall.cost_ms for stall in run.stalls if stall.cost_ms > 0},
        steps=times.steps,
        excess_ns={stall.cause: _excess_ns(run, stall) for stall in run.stalls},
        periodic=frozenset(stall.cause for stall in run.stalls if stall.period),
        run_ns=1e6 * sum(stall.cost_ms for stall in run.stalls),
        deviation_ns=1e6 * (times.high_ms - times.low_ms) / (2 * NORMAL_95),
    )


def _excess_ns(run: RankRun, stall: Stall) -> Floats:
    """Of each step that stalled mainly for this cause; all alike if they are not known."""
    series, times = run.series, run.times
    count = stall.steps
    if series is not None and times is not None:
        chosen = series.cause == STALL_CAUSES.index(stall.cause)
        excess = np.sort(series.step_ns[chosen] - 1e6 * times.typical_ms)
        if len(excess) and excess[0] > 0:
            return excess
    return np.ones(count)


# Another batch, more passes, more workers


def grow_stalls(stalls: StepStalls | None, factor: float) -> StepStalls | None:
    """A loader that cannot keep up needs `factor` times as long for so many samples. What comes
    every so many steps (evaluation, rollouts) may come after as many steps or as many samples."""
    if stalls is None:
        return None
    extra = (factor - 1.0) * stalls.by_count(PER_SAMPLES)
    grown = stalls.scaled(("data",), factor).scaled(PER_SAMPLES, 1 + (factor - 1) / 2)
    return grown.plus_doubt(abs(extra) / 2 / NORMAL_95) if extra else grown


def repeat_stalls(stalls: StepStalls | None, passes: float) -> StepStalls | None:
    """More passes per step: what comes with a pass comes more often, evaluation does not."""
    return stalls.scaled(_PER_PASS, passes) if stalls else None


def share_stalls(stalls: StepStalls | None, ranks: int, before: int) -> StepStalls | None:
    """All workers wait for one that stalls, so a step has the longest stall of any.

    Stalls that the script makes, and those that come every so many steps, are taken to coincide on
    all workers. The others are drawn independently, and half of what that adds is in doubt.
    """
    if stalls is None or ranks == before:
        return stalls
    if ranks == 1:
        stalls = stalls.without(("collective",))
    alone = [c for c in stalls.cost_ns if c not in _BY_THE_SCRIPT | stalls.periodic]
    factor = _longest_of(stalls, alone, ranks / before)
    more = stalls.scaled(alone, factor)
    return more.plus_doubt(_COINCIDENCE_DOUBT * abs(more.total_ns - stalls.total_ns))


def _longest_of(stalls: StepStalls, causes: list[str], draws: float) -> float:
    """The expected longest of `draws` steps' stalls, over one step's."""
    parts = []
    for cause in causes:
        excess = stalls.excess_ns.get(cause, np.zeros(0))
        if len(excess):
            parts.append(excess * stalls.cost_ns[cause] * stalls.steps / excess.sum())
    if not parts:
        return 1.0
    values = np.sort(np.concatenate(parts))[-stalls.steps :]
    reach = (np.arange(stalls.steps - len(values), stalls.steps + 1) / stalls.steps) ** draws
    return float((values * np.diff(reach)).sum() * stalls.steps / values.sum())


# In words


def describe_stalls(stalls: StepStalls | None) -> tuple[str, ...]:
    """What of the average step stays in stalls, without the smallest; nothing if there are none."""
    if stalls is None or not stalls.total_ns:
        return ()
    ordered = sorted(stalls.cost_ns.items(), key=lambda row: -row[1])
    large = [(cause, ns) for cause, ns in ordered if ns >= _LEAST_NAMED * stalls.total_ns]
    causes = ", ".join(f"{name_cause(cause)} {milliseconds(ns / 1e6)}" for cause, ns in large)
    whole = milliseconds(stalls.total_ns / 1e6)
    said = (f"the average step keeps {whole} of stalls ({causes})",)
    if not stalls.work_share:
        return said
    return (*said, "some steps regularly do more work. They change as other steps do")


def describe_workers_stalls(stalls: StepStalls | None, ranks: int, before: int) -> tuple[str, ...]:
    """Which stalls are taken to coincide."""
    if stalls is None or not stalls.total_ns or ranks == before:
        return ()
    longest = share_stalls(stalls, ranks, before)
    assert longest is not None
    now, then = (milliseconds(one.total_ns / 1e6) for one in (stalls, longest))
    together = sorted(c for c in stalls.cost_ns if c in _BY_THE_SCRIPT | stalls.periodic)
    alone = sorted(c for c in stalls.cost_ns if c not in together)
    words = [f"stalls of {now} per step become {then}, because all workers wait for the longest"]
    if together:
        words.append(f"{_list(together)} stalls are assumed to coincide on all workers")
    if alone:
        words.append(f"{_list(alone)} stalls are assumed to be independent")
    return ("; ".join(words),)


def _list(causes: list[str]) -> str:
    return ", ".join(map(name_cause, causes))


def name_cause(cause: str) -> str:
    return cause.replace("_", " ")


# What changes a typical step also changes the work of steps that are longer for having more of it
# (explain/budget.py); among the run's stalls they are unexplained.

_UNKNOWN = "unknown"


def with_longer_steps(stalls: StepStalls | None, analysis: RankAnalysis) -> StepStalls | None:
    """The stalls, knowing which share of the unexplained ones is work."""
    if stalls is None or _UNKNOWN not in stalls.periodic:
        return stalls
    longer = len(stalls.excess_ns.get(_UNKNOWN, ()))
    cost_ns = stalls.cost_ns.get(_UNKNOWN, 0.0) * stalls.steps
    if not longer or not cost_ns:
        return stalls
    return replace(stalls, work_share=min(1.0, longer * longer_work_ns(analysis) / cost_ns))
