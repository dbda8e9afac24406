"""What `explain` reports: numbers that add up, and findings about them.

Field names are the words of the JSON contract (docs/reference/json.md); times are integer ns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from stepscope.records.prediction import PredictedGain
from stepscope.records.quality import Note
from stepscope.records.source_lines import Place as Place
from stepscope.text.figures import milliseconds, percent
from stepscope.text.notebook import SEVERITY_COLOURS, MarkedLine, card, line
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.records.comparison import TriedRemedy
    from stepscope.records.compiled import CompiledWork
    from stepscope.records.hardware import Efficiency
    from stepscope.records.job import Job, RankPart
    from stepscope.records.memory import Memory
    from stepscope.records.nccl import (
        Choice,
        CommunicatorRow,
        NcclProcess,
        NcclWarning,
        TransportRow,
    )
    from stepscope.records.parameter_server import TogetherSummary
    from stepscope.records.rank import RanksWithoutTrace
    from stepscope.records.run import RankRun, RunOrigin, WholeRun
    from stepscope.records.strategies import RankStrategy, Strategy
    from stepscope.records.trace import Int8, Int32, Int64

WorkKind = Literal["compute", "comm", "memory"]
Severity = Literal["high", "medium", "low", "none"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # most severe first
# What a finding's share is a share of: the mean step, memory, the ranks' work, the run's wall time,
# or a trace in which no step was found.
ShareOf = Literal["step", "memory", "work", "run", "trace"]
_CARD_LINES = 4  # of a list in a notebook
# profiler: ProfilerStep marks; optimizer: between optimizer steps; repeated: what a loop repeats;
# window: none were found, and the trace is a span of time.
StepsSource = Literal["profiler", "optimizer", "repeated", "window"]
Basis = Literal["cycles", "window", "measured", "corrected"]  # what a budget's step is


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """span = compute + exposed_comm + exposed_memory + idle, exactly."""

    start_ns: int
    span_ns: int
    compute_ns: int
    exposed_comm_ns: int
    exposed_memory_ns: int
    idle_ns: int
    comm_ns: int  # union of communication, hidden or not
    memory_ns: int  # union of copies and memsets, hidden or not
    hidden_comm_ns: int  # communication that ran while compute ran

    @property
    def overlap(self) -> float | None:
        """Share of communication that runs while compute runs; None without communication."""
        return self.hidden_comm_ns / self.comm_ns if self.comm_ns else None


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Why the device had nothing to do. host + launch + other = idle, exactly.

    The five causes of host idle add up to host_ns exactly.
    """

    host_ns: int
    launch_ns: int
    other_ns: int
    data_loading_ns: int
    sync_ns: int
    operators_ns: int
    python_ns: int
    profiler_ns: int
    after_sync_ns: int  # host idle in gaps that a blocking call opened (any cause)
    after_sync_gaps: int


class Gaps(msgspec.Struct, frozen=True, kw_only=True):
    """Every idle gap as columns, for pictures and for places in code."""

    start_ns: Int64
    end_ns: Int64
    cause: Int8  # index into GAP_CAUSES: the cause that fills most of the gap
    frame: Int32  # Python function on the host at that moment, or -1


GAP_CAUSES = ("launch", "other", "data_loading", "sync", "operators", "python", "profiler")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One training step on the host's clock."""

    name: str
    start_ns: int
    dur_ns: int


class BatchReading(msgspec.Struct, frozen=True, kw_only=True):
    """How many samples a batch has, and what shows it."""

    size: int
    read_from: str
    doubt: str = ""  # why it may not be the number of samples
    one_graph: bool = False  # every step reads the same table of nodes: there may be no batch
    per_step: int | None = 1  # batches of a step; None: not known
    calls: int | None = None  # of the model with a batch, in a step; None: not known

    @property
    def sure(self) -> int | None:
        """None if there is a doubt."""
        return None if self.doubt else self.size


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps, where they come from, and the steady cycles that the budget covers.

    A cycle runs from the first device work of one step to the first of the next, so it holds
    exactly one data-loading gap, one backward and one optimizer step, whatever runs ahead.
    """

    source: StepsSource
    steps: tuple[Step, ...]
    cycles_ns: tuple[int, ...]
    window_start_ns: int
    window_end_ns: int
    first_cycle: int = 0  # the step that the first cycle belongs to
    repeats: str = ""  # what the steps were found by, if no mark shows them

    @property
    def is_span(self) -> bool:
        """Whether the trace is a stretch of time in which no step was found."""
        return self.source == "window"


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """All device events of one name."""

    name: str
    kind: WorkKind
    count: int
    total_ns: int
    min_ns: int
    max_ns: int
    # Of those that the steps launched; None where launches or steps are not known.
    steps_count: int | None = None
    steps_ns: int | None = None


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operator with the same input shapes."""

    name: str
    shapes: str
    dtypes: str
    calls: int
    host_total_ns: int  # outermost calls only: recursion is not counted twice
    host_self_ns: int
    device_total_ns: int
    device_self_ns: int


class Module(msgspec.Struct, frozen=True, kw_only=True):
    """One nn.Module by name: host time of its forward, device time of forward and backward."""

    name: str
    calls: int
    host_total_ns: int
    host_self_ns: int
    forward_device_ns: int
    backward_device_ns: int


class PythonFunction(msgspec.Struct, frozen=True, kw_only=True):
    """One Python function as the profiler names it: file, line of definition, function."""

    file: str
    line: int
    function: str
    calls: int
    host_total_ns: int
    host_self_ns: int
    device_ns: int


class Launches(msgspec.Struct, frozen=True, kw_only=True):
    """How device work got to the device."""

    device_events: int
    linked: int
    unlinked: int
    unlinked_ns: int
    calls: int  # runtime calls that launched something
    call_ns: int  # host time spent inside them
    latency_p50_ns: int | None  # call start to device start, when the stream was free
    latency_p90_ns: int | None
    queue_mean: float | None  # launched and not yet started, averaged over time
    queue_max: int | None
    queue_empty_share: float | None  # share of the span with nothing queued
    short_kernels: int  # kernels shorter than SHORT_KERNEL_NS
    short_kernels_ns: int
    kernels: int
    graph_kernels: int


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """All copies or memsets of one name."""

    name: str
    count: int
    total_ns: int
    size_bytes: int | None
    gb_s: float | None
    exposed_ns: int


class SyncCall(msgspec.Struct, frozen=True, kw_only=True):
    """All blocking runtime calls of one name, from one operator and one place in the code."""

    name: str
    operator: str
    count: int
    total_ns: int
    file: str | None = None
    line: int | None = None


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """All collectives of one kind, group and size on one rank."""

    kind: str
    group: str
    group_size: int | None
    size_bytes: int | None
    count: int
    total_ns: int
    exposed_ns: int
    algbw_gb_s: float | None
    busbw_gb_s: float | None


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The step in milliseconds. `corrected` has the profiler's cost removed, with a 95% interval:
    by measured steps where there are any, otherwise by calibrated constants."""

    profiled: float | None
    corrected: float | None = None
    low: float | None = None
    high: float | None = None
    truth: float | None = None
    mean: float | None = None  # of the steady steps
    median: float | None = None
    p99: float | None = None
    # The host's own time, without waits for the device, where the run measured it. None on a CPU:
    # there the step is the host's own time.
    host: float | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    ms: float
    share: float


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The step, divided. Shares add up to 1."""

    step_ms: float
    parts: tuple[Part, ...]
    basis: Basis


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """Something that may help (changes/), with its predicted saving where known, and the
    measured one where `tune` has tried it."""

    id: str
    summary: str
    # Saved per step, for the samples of a present one; below zero, it gets longer.
    predicted_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    step_ms: float | None = None  # the step that this is saved of
    changed_ms: float | None = None  # the step with the remedy
    samples_factor: float = 1.0  # samples of a step with the remedy, over those without
    measured_ms: float | None = None  # saved per step, as measured
    measured_low_ms: float | None = None
    measured_high_ms: float | None = None
    tried: TriedRemedy | None = None

    @property
    def gain(self) -> PredictedGain | None:
        """Return what is predicted, if anything."""
        if self.predicted_ms is None or self.step_ms is None:
            return None
        low = self.predicted_ms if self.low_ms is None else self.low_ms
        high = self.predicted_ms if self.high_ms is None else self.high_ms
        return PredictedGain(
            saved_ms=self.predicted_ms,
            low_ms=low,
            high_ms=high,
            step_ms=self.step_ms,
            changed_ms=self.changed_ms,
            samples_factor=self.samples_factor,
        )


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One change that was tried on a step's graph: what it would save, or that it does not help."""

    setting: str  # as `whatif --set` takes it
    label: str
    verdict: Literal["faster", "slower", "no difference"]
    summary: str
    saved_ms: float  # per step as it is now; a larger batch is divided among its samples
    saved_low_ms: float
    saved_high_ms: float
    baseline_ms: float  # the step as it is
    predicted_ms: float  # the step with the change
    low_ms: float
    high_ms: float
    throughput_factor: float
    findings: tuple[str, ...] = ()  # that offer it as a remedy
    rank: int | None = None
    tried: TriedRemedy | None = None  # the remedy that makes this change, measured by `tune`

    @property
    def gain(self) -> PredictedGain:
        samples = self.throughput_factor * self.predicted_ms / self.baseline_ms
        return PredictedGain(
            saved_ms=self.saved_ms,
            low_ms=self.saved_low_ms,
            high_ms=self.saved_high_ms,
            step_ms=self.baseline_ms,
            changed_ms=self.predicted_ms,
            samples_factor=samples,
        )


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing worth knowing about a step. `id` names its file and its docs page."""

    id: str
    title: str
    share: float
    severity: Severity
    summary: str
    evidence: tuple[str, ...]
    where: tuple[Place, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    rank: int | None = None
    of: ShareOf = "step"
    # The command that tries the remedies which can be applied; None where none can.
    try_command: str | None = msgspec.field(default=None, name="try")


class RankExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, fully accounted for."""

    path: str
    rank: int | None
    world_size: int | None
    device: str | None
    kind: str
    events: int
    timeline: Timeline
    idle: Idle
    gaps: Gaps | None  # None outside the process that read the trace
    steps: Steps
    step_ms: StepTime
    budget: Budget
    kernels: tuple[Kernel, ...]
    operators: tuple[Operator, ...]
    modules: tuple[Module, ...]
    lines: tuple[PythonFunction, ...]
    launches: Launches
    copies: tuple[Copy, ...]
    syncs: tuple[SyncCall, ...]
    collectives: tuple[Collective, ...]
    part: RankPart  # what the job needs of it
    strategies: tuple[RankStrategy, ...]
    findings: tuple[Finding, ...]
    quality: tuple[Note, ...]
    efficiency: Efficiency | None = None
    memory: Memory | None = None
    profiled_budget: Budget | None = None  # of the step as recorded, with the profiler's cost
    run: RankRun | None = None  # every step; None for a bare trace
    compiled: CompiledWork | None = None  # None where nothing is compiled
    name: str = ""  # "rank 0", or "process 1" where processes belong to no group

    @property
    def called(self) -> str:
        """Its name in sentences."""
        return self.name or f"rank {self.rank}"

    def __repr__(self) -> str:
        title = self.findings[0].title if self.findings else "no findings"
        return line("RankExplanation", f"rank {self.rank}, {title}", _step_words(self.budget))


def called(ranks: Iterable[RankExplanation], number: int | None) -> str:
    """The name in sentences of the rank with this number."""
    return next((rank.called for rank in ranks if rank.rank == number), f"rank {number}")


class NcclSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What all NCCL logs of a job show."""

    files: tuple[str, ...]
    versions: tuple[str, ...]
    processes: tuple[NcclProcess, ...]
    communicators: tuple[CommunicatorRow, ...]
    transports: tuple[TransportRow, ...]
    choices: tuple[Choice, ...]
    settings: dict[str, tuple[str, ...]]  # name -> distinct values over the processes
    warnings: tuple[NcclWarning, ...]  # `process` is an index into the processes here
    findings: tuple[Finding, ...]
    calls: int
    notes: tuple[str, ...]


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """The problem that the verdict names, and the remedy of that problem that `next` names."""

    finding: str
    remedy: str | None = None  # None where no remedy of the finding is known to help


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks, and one verdict over them."""

    verdict: str
    why: str
    next: str
    ranks: tuple[RankExplanation, ...]
    budget: Budget
    findings: tuple[Finding, ...]
    headline: Headline | None = None
    also: str = ""  # what other changes buy, whatever the verdict is
    job: Job | None = None  # with several ranks
    strategies: tuple[Strategy, ...] = ()
    nccl: NcclSummary | None = None
    together: TogetherSummary | None = None  # of a run through a parameter server
    quality: tuple[Note, ...] = ()  # about the set of files, such as one left out
    advice: tuple[Advice, ...] = ()  # changes that were tried, the best first
    run: WholeRun | None = None  # None for bare traces
    without_trace: RanksWithoutTrace | None = None  # ranks of the job that recorded none
    origin: RunOrigin | None = None  # None for bare traces

    def __repr__(self) -> str:
        ranks = counted(len(self.ranks), "rank")
        return line("Explanation", self.verdict, _step_words(self.budget), ranks)

    def _repr_html_(self) -> str:
        several = len(self.ranks) > 1
        findings = [_finding_line(one, several) for one in self.findings[:_CARD_LINES]]
        advice = [_advice_line(one) for one in self.advice if one.verdict == "faster"]
        rows = (
            ("why", self.why),
            ("next", self.next),
            ("also", self.also),
            ("findings", findings),
            ("what if", advice[:_CARD_LINES]),
        )
        aside = f"{_step_words(self.budget)} · {counted(len(self.ranks), 'rank')}"
        parts = ((part.id, part.share) for part in self.budget.parts)
        return card(self.verdict, rows, aside=aside, parts=parts)


def _finding_line(finding: Finding, several_ranks: bool) -> MarkedLine:
    place = f" ({finding.where[0].file}:{finding.where[0].line})" if finding.where else ""
    rank = f", rank {finding.rank}" if several_ranks and finding.rank is not None else ""
    share = percent(finding.share) if finding.share else ""
    return MarkedLine(SEVERITY_COLOURS[finding.severity], share, f"{finding.title}{rank}{place}")


def _advice_line(advice: Advice) -> MarkedLine:
    gain, ends = advice.gain.words()
    text = " ".join(filter(None, (ends, f"{advice.label}, {advice.setting}")))
    return MarkedLine(SEVERITY_COLOURS["none"], gain, text)


def _step_words(budget: Budget) -> str:
    return f"{milliseconds(budget.step_ms)} {'in all' if budget.basis == 'window' else 'a step'}"
