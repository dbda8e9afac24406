"""What findings look at, and the thresholds and words they share: how often steps stall,
what that costs, where, and what to offer for a slow DataLoader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np

from stepscope import changes as remedies
from stepscope.explain.host_calls import place_of, user_frames
from stepscope.records import explanation
from stepscope.records.compiled import CompiledWork
from stepscope.records.explanation import Finding, Place, Remedy, Severity, ShareOf
from stepscope.records.hardware import MOST_SHAPES, Efficiency, Spot, which_call
from stepscope.records.job import Job, SimilarRuns
from stepscope.records.memory import Memory
from stepscope.records.rank_facts import CodePlace, LoaderUse
from stepscope.records.run import WITHOUT_GRADIENTS, AccountPart, RankRun, Stall, StallCause
from stepscope.records.strategies import RankStrategy, Strategy
from stepscope.records.trace import Trace
from stepscope.step.arrays import Int32s, Int64s
from stepscope.step.call_tree import group, sum_by
from stepscope.step.cuda_graphs import MOSTLY
from stepscope.text.figures import duration, milliseconds, percent
from stepscope.text.words import counted, ordinal

if TYPE_CHECKING:
    from stepscope.explain.cpu_use import CpuUse
    from stepscope.explain.kernels import Launched

HIGH, MEDIUM, LOW = 0.25, 0.10, 0.03
_LONG_MS, _VERY_LONG_MS = 60_000.0, 600_000.0  # of a start-up: a longer training makes it small
_BUSY = ("compute", "exposed_comm", "exposed_memory")


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's numbers. Timeline, idle, gaps and `launched` cover the budget's window; the tables
    and `whole` cover the whole trace."""

    trace: Trace
    on_host: bool
    timeline: explanation.Timeline
    whole: explanation.Timeline
    idle: explanation.Idle
    gaps: explanation.Gaps
    budget: explanation.Budget
    kernels: tuple[explanation.Kernel, ...]
    launches: explanation.Launches
    launched: Launched
    copies: tuple[explanation.Copy, ...]
    syncs: tuple[explanation.SyncCall, ...]
    collectives: tuple[explanation.Collective, ...]
    efficiency: Efficiency | None = None
    memory: Memory | None = None
    cpu: CpuUse | None = None  # for a step that computes on the CPU
    strategies: tuple[RankStrategy, ...] = ()
    layout: dict[str, Any] = {}  # rank.json's "communication"; empty for a bare trace
    similar: SimilarRuns | None = None  # runs of the same script beside this one
    cycles: int = 1  # steps in the budget's window
    run: RankRun | None = None  # all steps of the rank, where they were captured
    compiled: CompiledWork | None = None  # what torch.compile did
    replayed: float = 0.0  # of the device's time: launched by CUDA graphs
    longer_work_ns: float = 0.0  # that the device does more in steps that come at a fixed distance

    @property
    def device(self) -> str:
        """The word for the device in sentences."""
        return "CPU" if self.on_host else "GPU" if self.trace.kind in ("cuda", "rocm") else "device"

    @property
    def is_graphed(self) -> bool:
        """CUDA graphs launch most of the step already."""
        return self.replayed > MOSTLY

    @property
    def is_compiled(self) -> bool:
        """torch.compile's graphs do most of the computing already."""
        computing_ms = self.budget_share("compute") * self.budget.step_ms
        return self.compiled is not None and self.compiled.is_most_of(computing_ms)

    @property
    def unknown_share(self) -> float:
        """Of the step: time on a GPU in kernels that may multiply matrices, with unknown FLOPs."""
        if self.on_host or self.efficiency is None:
            return 0.0
        return self.efficiency.unknown_share * self.budget_share("compute")

    def budget_share(self, *ids: str) -> float:
        """Share of the step of record that these parts of the budget take."""
        return sum(part.share for part in self.budget.parts if part.id in ids)

    def window_share(self, ns: float) -> float:
        """Share of the budget's window."""
        return ns / self.timeline.span_ns if self.timeline.span_ns else 0.0

    def device_share(self, ns: float) -> float:
        """Share of the step of record for device time in the window. The profiler makes steps
        longer, but not kernels. Kernels that run in parallel count once at most."""
        computing = self.window_share(self.timeline.compute_ns)
        if not computing:
            return 0.0
        return min(1.0, self.window_share(ns) * self.budget_share("compute") / computing)

    def idle_share(self, ns: float) -> float:
        """Share of the step of record for idle time in the window: the step of record has less."""
        idle = self.window_share(self.timeline.idle_ns)
        idle_now = sum(part.share for part in self.budget.parts if part.id not in _BUSY)
        return min(1.0, self.window_share(ns) * idle_now / idle) if idle else 0.0

    def mean_step_share(self, ns: float) -> float:
        """Share of the step for device time of the window's mean step, such as a Spot's."""
        return self.device_share(ns * self.cycles)

    def step_ms(self, share: float) -> str:
        """A share of the step in words: 3.67 ms of the 5.85 ms step."""
        step_ms = self.budget.step_ms
        return f"{milliseconds(share * step_ms)} of the {milliseconds(step_ms)} step"

    def budget_ms(self, *ids: str) -> str:
        """These parts of the budget in the same words."""
        return self.step_ms(self.budget_share(*ids))


class JobEvidence(NamedTuple):
    """What several ranks show together."""

    job: Job
    strategies: Sequence[Strategy]


Scope = Literal["rank", "job", "nccl", "together"]


class FindingRule(msgspec.Struct, frozen=True, kw_only=True):
    """One finding: its title, and the function that returns it or None."""

    id: str  # its function's name with dashes, and its page in docs/findings
    scope: Scope
    title: str
    judge: Callable[[Any], Finding | None]
    part: str  # of the rank's evidence that it looks at, as a snapshot has memory and nothing else

    def find(self, evidence: Any) -> Finding | None:
        """Return the finding, or None where this evidence of its scope does not show it."""
        seen = getattr(evidence, self.part) if self.part else evidence
        return None if seen is None else self.judge(seen)

    def finding(
        self,
        *,
        share: float,
        summary: str,
        evidence: tuple[str, ...],
        severity: Severity | None = None,
        title: str = "",
        where: tuple[Place, ...] = (),
        remedies: tuple[Remedy, ...] = (),
        rank: int | None = None,
        of: ShareOf = "step",
    ) -> Finding:
        """A finding of this rule, as severe as its share unless `severity` says otherwise; `title`
        replaces the rule's own where it depends on the case."""
        return Finding(
            id=self.id,
            title=title or self.title,
            share=share,
            severity=severity or severity_of(share),
            summary=summary,
            evidence=evidence,
            where=where,
            remedies=remedies,
            rank=rank,
            of=of,
        )


def rule(
    title: str, *, scope: Scope = "rank", part: Literal["", "memory", "run"] = ""
) -> Callable[[Callable[..., Finding | None]], FindingRule]:
    """Declare a function as a finding, whose id is the function's name with dashes."""

    def declare(judge: Callable[..., Finding | None]) -> FindingRule:
        name = judge.__name__.replace("_", "-")
        return FindingRule(id=name, scope=scope, title=title, judge=judge, part=part)

    return declare


def spot_words(evidence: RankEvidence, spot: Spot) -> str:
    """An operator with its shapes, or its line, and its time in the step."""
    time = evidence.step_ms(evidence.mean_step_share(spot.device_ns))
    return f"{spot.operator} {which_call(spot, MOST_SHAPES)}: {time}"


def severity_of(share: float) -> Severity:
    """How severe the loss of this share of the step is."""
    return "high" if share >= HIGH else "medium" if share >= MEDIUM else "low"


def kernel_severity(evidence: RankEvidence, saved: float) -> Severity:
    """How severe slow kernels are. While the step waits for the host, faster kernels would only
    wait longer, so the severity is medium at most."""
    waits_for_host = evidence.budget_share("operators", "python", "data_loading") >= HIGH
    return "medium" if severity_of(saved) == "high" and waits_for_host else severity_of(saved)


def places(evidence: RankEvidence, causes: Iterable[int], most: int = 3) -> tuple[Place, ...]:
    """The lines of the user's code during gaps with these causes, the costliest first."""
    gaps, trace = evidence.gaps, evidence.trace
    chosen = np.flatnonzero(np.isin(gaps.cause, list(causes)) & (gaps.frame >= 0))
    return costliest_places(trace, gaps.frame[chosen], (gaps.end_ns - gaps.start_ns)[chosen], most)


def costliest_places(trace: Trace, rows: Int32s, cost: Int64s, most: int = 3) -> tuple[Place, ...]:
    """The user's functions around these host rows, the costliest first; none without stacks."""
    frames = user_frames(trace, rows)
    known = frames >= 0
    if not known.any():
        return ()
    first, inverse, count = group(trace.host.name[frames[known]])
    total = sum_by(inverse, cost[known], count)
    names = (trace.strings[trace.host.name[frames[known][first[i]]]] for i in np.argsort(-total))
    return tuple(place for name in names if (place := place_of(name)))[:most]


# What findings about the whole run share: how often steps stall, what that costs, and where.

_FEW = 3  # stalls: a frequency would promise too much
_MOST_NUMBERS = 4
_LEAST_WANTED, _MUCH_WANTED = 0.05, 0.25  # of the training loop
_HOUR_MS = 3.6e6
_ONCE = "it happened once: only a longer run shows whether it happens again"
# Of the account.
_LOOP = ("training", *WITHOUT_GRADIENTS, "checkpoint", "between_epochs", "outside")


def costly_stall(run: RankRun, *causes: StallCause) -> Stall | None:
    """The costliest stall with one of these causes, if it takes 3% of the mean step or more."""
    stalls = [stall for stall in run.stalls if stall.cause in causes and stall.share >= LOW]
    return max(stalls, key=lambda stall: stall.share, default=None)


def stalling_steps(stall: Stall, run: RankRun, one: str, many: str) -> str:
    """Return subject and verb: `Every 4th step waits`, `1 step in 12 waits`, `3 steps of 80 wait`.
    `one` and `many` are the verb's forms."""
    if stall.period == 1:
        return f"Every step {one}"
    if stall.period:
        return f"Every {ordinal(stall.period)} step {one}"
    all_steps = run.times.steps if run.times else run.steps
    if stall.steps <= _FEW:
        return (
            f"{counted(stall.steps, 'step')} of {all_steps:,} {one if stall.steps == 1 else many}"
        )
    share = stall.steps / max(1, all_steps)
    if share > 0.4:
        return f"{percent(share)} of all steps {many}"
    return f"1 step in {round(1 / share):,} {one}"


def typical_wait(stall: Stall) -> str:
    """What one of these stalls adds to its step."""
    return duration(1e6 * stall.typical_ms)


def where_words(stall: Stall) -> str:
    """The line that ran in most of these stalls: `, in log_images (train.py:40)`."""
    return f", in {stall.where[0].words}" if stall.where else ""


def cost_lines(stall: Stall, run: RankRun) -> tuple[str, ...]:
    """What it costs on average, and its longest cases."""
    if run.times is None:
        return ()
    numbers = ", ".join(f"{number:,}" for number in stall.numbers[:_MOST_NUMBERS])
    longest = f"the longest {duration(1e6 * stall.longest_ms)}"
    return (
        f"{milliseconds(stall.cost_ms)} of the {milliseconds(run.times.mean_ms)} mean step; a "
        f"typical step takes {milliseconds(run.times.typical_ms)}",
        f"{counted(stall.steps, 'step')} of {run.times.steps:,}, {longest}"
        + (f" (steps {numbers})" if len(stall.numbers) > 1 else ""),
        *([_ONCE] if _came_once(stall) else []),
    )


def stall_severity(stall: Stall) -> Severity | None:
    """None: as severe as its share. What came once may never come again, so its share of a short
    run says little about a long one."""
    return "low" if _came_once(stall) else None


def _came_once(stall: Stall) -> bool:
    return stall.steps == 1 and stall.period is None and not stall.between_epochs_ms


def account_part(run: RankRun, name: str) -> AccountPart | None:
    """A part of the wall time; None where the wall time is not known."""
    parts = run.account.parts if run.account else ()
    return next((part for part in parts if part.id == name), None)


class ShortRun(NamedTuple):
    """What something that passes once would be of a run with an hour of training."""

    share: float
    words: str


def length_severity(share: float, ms: float) -> Severity:
    """Of start-up or compiling: what is short in itself is small in a real training, whatever its
    share of a test."""
    if ms >= _VERY_LONG_MS and share >= HIGH:
        return "high"
    return "medium" if ms >= _LONG_MS and share >= MEDIUM else "low"


def as_short_run(run: RankRun, once_ms: float) -> ShortRun | None:
    """For a run that trained for less time than something took that passes once, such as start-up.
    None for any other run, which is judged as it is."""
    parts = run.account.parts if run.account else ()
    loop_ms = sum(part.ms for part in parts if part.id in _LOOP)
    if not parts or loop_ms >= once_ms:
        return None
    share = once_ms / (once_ms + _HOUR_MS)
    words = f"this run trained for {duration(1e6 * loop_ms)} only; with an hour of training it"
    return ShortRun(share, f"{words} would be {percent(share)} of the run")


class BesideSteps(NamedTuple):
    """Work that is wanted but is no training: evaluation, or saving checkpoints."""

    share: float  # of the training loop: the wall time without start-up, warm-up and shut-down
    how_often: str
    evidence: tuple[str, ...]
    where: tuple[Place, ...]


def beside_steps(run: RankRun, name: StallCause) -> BesideSteps:
    """From the account; without one, from what the steps and the time between epochs show."""
    stall = next((stall for stall in run.stalls if stall.cause == name), None)
    part = account_part(run, name)
    if part is not None and run.account is not None:
        took = part.ms
        whole = sum(part.ms for part in run.account.parts if part.id in _LOOP)
        lines = [f"{duration(1e6 * took)} of the {duration(1e6 * whole)} of the training loop"]
    else:
        took, whole = _per_step(run, stall)
        lines = [f"{milliseconds(took)} for each step of {milliseconds(whole)}"]
    if stall is not None and stall.steps:
        lines.append(f"in {counted(stall.steps, 'step')}, {typical_wait(stall)} each")
    if stall is not None and stall.between_epochs_ms:
        lines.append(f"between epochs: {milliseconds(stall.between_epochs_ms)} for each step")
    every = (
        f": {typical_wait(stall)} every {stall.period:,} steps" if stall and stall.period else ""
    )
    return BesideSteps(
        share=took / whole if whole else 0.0,
        how_often=every,
        evidence=tuple(lines),
        where=stall.where if stall else (),
    )


def _per_step(run: RankRun, stall: Stall | None) -> tuple[float, float]:
    """Milliseconds for each step, of the mean step with the time between epochs."""
    between = sum(stall.between_epochs_ms for stall in run.stalls)
    whole = run.times.mean_ms + between if run.times else 0.0
    return (stall.cost_ms + stall.between_epochs_ms if stall else 0.0), whole


def wanted_work_severity(share: float) -> Severity | None:
    """None under 5% of the training loop: evaluation and checkpoints are wanted."""
    if share < _LEAST_WANTED:
        return None
    return "high" if share >= _MUCH_WANTED else "medium" if share >= MEDIUM else "low"


# What the findings about data offer, from what capture read of the DataLoader.


def describe_loader(loader: LoaderUse | None) -> tuple[str, ...]:
    """A line of evidence: the loader's settings and what a batch costs."""
    if loader is None:
        return ()
    workers = counted(loader.workers, "worker") if loader.workers else "no workers"
    words = [f"the DataLoader has {workers}" + (" that persist" if loader.persistent else "")]
    if loader.dataset:
        iterable = " (IterableDataset)" if loader.iterable else ""
        words.append(f"{loader.dataset}{iterable}")
    made_ns = make_ns(loader)
    if made_ns is not None:
        words.append(f"a batch takes {duration(made_ns)} to make")
    return (", ".join(words),)


def make_ns(loader: LoaderUse) -> float | None:
    """To make one batch, in the process that makes it; None if too few were counted."""
    if not loader.workers:
        return loader.fetch.mean_ns()
    return loader.make.mean_ns() if loader.make else None


def offer_for_waits(loader: LoaderUse | None, *, gpu: bool) -> tuple[Remedy, ...]:
    """What may shorten waits for data. How many workers help is predicted, so no remedy here
    promises that more do."""
    if loader is None:
        unknown = remedies.NO_DATA_WAIT.offer(
            "Try more DataLoader workers (num_workers=4, persistent_workers=True). How the data is "
            "loaded was not captured"
        )
        return (unknown, remedies.PIN_MEMORY.offer()) if gpu else (unknown,)
    words = f"Try another num_workers in the DataLoader (it has {loader.workers})"
    if loader.iterable:
        words += ". Its dataset only yields: each worker must take its share"
    return (
        remedies.LOADER_WORKERS.offer(words),
        remedies.CHEAPER_BATCH.offer(_cheaper_words(loader)),
        *_for_workers(loader),
        *([remedies.PIN_MEMORY.offer()] if gpu and not loader.pinned else []),
    )


def _cheaper_words(loader: LoaderUse) -> str:
    """Names the line that makes an item, or the one that collates a batch."""
    places = [place for place in (loader.made_at, loader.collated_at) if place is not None]
    if not places:
        return remedies.CHEAPER_BATCH.action
    made_ns = make_ns(loader)
    takes = f" (it takes {duration(made_ns)})" if made_ns is not None else ""
    return f"Make a batch cheaper{takes}, in {' and '.join(map(_words, places))}"


def _words(place: CodePlace) -> str:
    return f"{PurePath(place.file).name}:{place.line} ({place.function})"


def _for_workers(loader: LoaderUse) -> list[Remedy]:
    """Only where there are workers, and a second epoch began."""
    if not loader.workers or loader.persistent or loader.epochs < 2:
        return []
    return [remedies.PERSISTENT_WORKERS.offer()]
