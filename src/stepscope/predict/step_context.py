"""Describe the step that a what-if reads: its graph, operators, batch, parameters, optimizer
and planned workers. Nothing here changes the step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.memory.model import StepCalls
from stepscope.predict.fitted import table
from stepscope.predict.kernel_costs import Family, family_of
from stepscope.predict.peak_memory.backward_graph import MemoryChange
from stepscope.records.explanation import BatchReading, Steps
from stepscope.records.job import Job
from stepscope.records.memory import Memory
from stepscope.records.trace import HostKind, Trace
from stepscope.step.call_tree import by_text, distinct_counts, distinct_places
from stepscope.step.graph import CallKind, Phase, StepGraph
from stepscope.step.phases import FORWARD
from stepscope.step.steps import step_of
from stepscope.step.work import Work, rows_named
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.cpu_use import CpuUse
    from stepscope.explain.flops.costs import Costs
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.predict.stalls import StepStalls
    from stepscope.records.hardware import Ceilings, Profile
    from stepscope.records.parameter_server import ConsistencyPromise
    from stepscope.step.graph import Flags, Floats, Ints

    Rows = NDArray[np.intp]

# What is planned about workers, and the exchange of gradients that follows from it.


class GivenLink(msgspec.Struct, frozen=True, kw_only=True):
    """The link of one host to the others, as the user states it."""

    bytes_s: float
    latency_ns: float | None = None  # of one message; None: not stated


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """So many hosts with as many ranks of the exchange on each as before."""

    count: int
    per_host: int
    before: int
    link: GivenLink | None = None  # None: as captured or calibrated


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    ranks: int
    hosts: HostPlan | None = None  # None: nothing was asked about hosts
    strong: bool = False  # all workers together keep the batch
    bucket_mb: float | None = None  # None: as traced, else DDP's own
    bandwidth: float = 1.0
    latency: float = 1.0
    stage: int = 0  # of ZeRO


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """The planned exchange and what it does to the step."""

    ranks: int
    before: int  # workers of the trace
    basis: str
    buckets: int
    size_bytes: int
    comm_ns: float  # all collectives, one after the other
    exposed_ns: float  # what they add to the step
    least_ns: float  # no link makes the step shorter
    straggling: float  # the slowest worker's step over a usual one
    held_bytes: int = 0  # DDP's buckets, if the trace has none yet
    summary: str = ""


# The model's parameters, read from backward's accumulation of gradients.
#
# A gradient is accumulated once in every backward pass that reaches its parameter. A step with
# several micro-batches or losses has several passes that reach the same parameters. So a pass does
# not count if a later one brings the same gradients, or if a longer one begins with it.

ACCUMULATE = "torch::autograd::AccumulateGrad"
_UPDATE = "Optimizer.step#"


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    tensors: int
    elements: int
    shapes: tuple[tuple[int, ...], ...]


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    rows: Rows  # indices among the accumulations
    shapes: tuple[int, ...]  # codes, in backward's order
    updates: int  # optimizer steps before it

    def repeats(self, other: Pass) -> bool:
        """Whether its parameters are among those of the other one.

        Without an optimizer step in between, the same gradients are another micro-batch's. With one
        they may belong to another network of the same kind. But a longer pass that begins with them
        goes through the same network, as a generator's pass does with its discriminator.
        """
        if len(self.shapes) < len(other.shapes):
            return other.shapes[: len(self.shapes)] == self.shapes
        return self.updates == other.updates and sorted(self.shapes) == sorted(other.shapes)


def find_parameters(analysis: RankAnalysis) -> Parameters | None:
    """Parameters of a mean step; None if the trace shows no accumulation, or no shapes."""
    trace = analysis.trace
    host = trace.host
    rows = np.flatnonzero(
        rows_named(trace, host, host.kind == HostKind.OPERATOR, lambda name: name == ACCUMULATE)
    )
    if not len(rows) or (host.shapes[rows] < 0).any():
        return None
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    passes = _passes(analysis, rows)
    rows = rows[np.concatenate([one.rows for step in passes for one in _without_repeats(step)])]
    codes, counts = distinct_counts(host.shapes[rows])
    shapes = []
    for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
        dims = msgspec.json.decode(trace.strings[code])
        if dims and isinstance(dims[0], list):
            shapes += [tuple(dims[0])] * max(1, round(count / len(passes)))
    return Parameters(
        tensors=len(shapes), elements=sum(map(math.prod, shapes)), shapes=tuple(shapes)
    )


def _without_repeats(passes: list[Pass]) -> list[Pass]:
    """When a step runs several identical passes, keep the last."""
    left = list(passes)
    for one in passes:
        if any(other is not one and one.repeats(other) for other in left):
            left = [other for other in left if other is not one]
    return left


def _passes(analysis: RankAnalysis, rows: Rows) -> list[list[Pass]]:
    """Backward passes by step, in order. Operators of the forward pass lie between two passes.

    Passes outside all steps count only if no pass is inside one: the window opened or closed in a
    step.
    """
    trace = analysis.trace
    host = trace.host
    start = host.start_ns[rows]
    known = analysis.steps.steps
    step = step_of(known, start) if known else np.zeros(len(rows), np.int64)
    # On the thread that runs most of forward; others, such as a loader's, also run in backward.
    forward = (host.kind == HostKind.OPERATOR) & (analysis.costs.phase == FORWARD)
    main = np.bincount(host.thread[forward], minlength=1).argmax()
    forward_starts = np.sort(host.start_ns[forward & (host.thread == main)])
    forwards = np.searchsorted(forward_starts, start)
    stepping = rows_named(
        trace, host, host.kind == HostKind.ANNOTATION, lambda name: name.startswith(_UPDATE)
    )
    updates = np.searchsorted(np.sort(host.start_ns[stepping]), start)
    edges = np.flatnonzero(np.diff(forwards) | np.diff(step)) + 1
    by_step: dict[int, list[Pass]] = {}
    for indices in np.split(np.arange(len(rows)), edges):
        first = indices[0]
        shapes = tuple(host.shapes[rows[indices]].tolist())
        one = Pass(rows=indices, shapes=shapes, updates=int(updates[first]))
        by_step.setdefault(int(step[first]), []).append(one)
    return [passes for number, passes in by_step.items() if number >= 0] or [*by_step.values()]


# Where the step lies in the trace, and whether compiled code runs in it.

_COMPILED_MARKS = (
    "triton_",
    "## Call CompiledFxGraph",
    "CompiledFunction",
    "Torch-Compiled Region",
)


def step_window(context: StepContext) -> tuple[int, int]:
    """Return the start and the end of the step that the graph's calls were taken from."""
    host, rows = context.trace.host, context.graph.calls.row
    rows = rows[rows >= 0]
    start = host.start_ns[rows]
    steps = context.steps.steps
    if not len(rows):
        return 0, 0
    number = int(step_of(steps, start.max(keepdims=True))[0]) if steps else -1
    if number >= 0:
        return steps[number].start_ns, steps[number].start_ns + steps[number].dur_ns
    return int(start.min()), int((start + host.dur_ns[rows]).max())


def in_step(context: StepContext) -> Flags:
    """Events of the host that start in this step."""
    start = context.trace.host.start_ns
    begin, end = step_window(context)
    inside: Flags = (start >= begin) & (start < end)
    return inside


def is_compiled(context: StepContext) -> bool:
    """Look for names that the compiler's code leaves in a trace."""
    return any(name.startswith(_COMPILED_MARKS) for name in context.trace.strings)


def launch_ns(context: StepContext) -> float:
    """The host's time per launch of both passes."""
    calls = context.graph.calls
    launching = (calls.phase == Phase.FORWARD) | (calls.phase == Phase.BACKWARD)
    launching &= calls.kind == CallKind.LAUNCH
    total = float((calls.gap_ns + calls.call_ns)[launching].sum())
    return total / max(1, int(launching.sum()))


# Update rules of optimizers (Adam, SGD), and what each form of them costs.


class UpdateForm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the update: loop, foreach or fused.

    Only ratios of the host's times are used, so a slow host stays slow.
    """

    step_us: float  # of the host, per step
    tensor_us: float  # of the host, per tensor
    element_ns: float = 0.0  # of the host, per parameter: on a CPU
    bytes_each: float = 0.0  # per parameter, at the device's full bandwidth
    launches: float = 0.0  # per million parameters
    fewest: int = 1  # launches
    order: int  # the later form replaces the earlier one

    def host_us(self, tensors: int, elements: int) -> float:
        return self.step_us + self.tensor_us * tensors + self.element_ns * elements / 1e3


class UpdateRule(msgspec.Struct, frozen=True, kw_only=True):
    """How parameters are updated, in each of its forms."""

    name: str
    forms: dict[str, UpdateForm]  # with a GPU
    cpu_forms: dict[str, UpdateForm]
    state_bytes: int  # per fp32 parameter, with what the optimizer keeps
    fused: bool = True  # PyTorch has a fused form for a GPU
    fused_on_cpu: bool = True


_FORMS = dict[str, UpdateForm]
ADAM = UpdateRule(
    name="Adam",
    forms=table("host.adam", _FORMS),
    cpu_forms=table("host.cpu_adam", _FORMS),
    state_bytes=12,
)
MOMENTUM = UpdateRule(
    name="SGD with momentum",
    forms=table("host.momentum", _FORMS),
    cpu_forms=table("host.cpu_momentum", _FORMS),
    state_bytes=8,
)
PLAIN = UpdateRule(
    name="SGD",
    forms=table("host.plain_sgd", _FORMS),
    cpu_forms=table("host.cpu_plain_sgd", _FORMS),
    state_bytes=4,
)
ADAGRAD = UpdateRule(
    name="Adagrad",
    forms=ADAM.forms,
    cpu_forms=table("host.cpu_adagrad", _FORMS),
    state_bytes=8,
    fused=False,
)


# What a what-if reads: the step's graph, and what is known about each of its tasks.


class Operators(msgspec.Struct, frozen=True, kw_only=True):
    """The operator behind each task, and its work. Inserted tasks have none."""

    row: Ints  # host row, -1 if not known
    flops: Floats  # of the whole operator, 0 none, -1 unknown
    bytes_moved: Floats  # of the whole operator, -1 unknown
    dtype: NDArray[np.int8]  # code of explain.flops.DTYPES, -1 if not known
    family: NDArray[np.int8]
    recomputed: Flags
    share: Floats  # this task's share of the operator's device time


class StepContext(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One rank's typical step, without the profiler's cost."""

    analysis: RankAnalysis
    trace: Trace
    work: Work
    steps: Steps
    graph: StepGraph
    costs: Costs
    parameters: Parameters | None
    ceilings: Ceilings | None
    memory: Memory | None = None
    calls: StepCalls | None = None  # of a step's forward, if shapes were recorded
    batch: int | None = None  # None: the trace does not say, or what it says is doubtful
    batch_reading: BatchReading | None = None
    rule: UpdateRule = ADAM  # of the optimizer
    grown: float = 1.0  # samples per step over those of the trace
    is_as_traced: bool = True  # operators run on the trace's device in its precision
    memory_change: MemoryChange = MemoryChange()  # that peak memory is worked out with
    update_form: str | None = None  # of the optimizer, if it was changed
    multiprocessors: int
    profiles: tuple[Profile, ...] = ()
    cpu: CpuUse | None = None  # of a step that computes on the CPU
    job: Job | None = None
    # Measured, without the profiler if the run recorded that; no stalls if those are known.
    steps_ns: tuple[int, ...] = ()
    stalls: StepStalls | None = None  # next to this step; None if the run's steps are not known
    bare: StepGraph | None = None  # the step before an exchange was planned
    bare_stalls: StepStalls | None = None
    plan: WorkerPlan | None = None
    exchange: Exchange | None = None  # as it was planned last
    consistency: ConsistencyPromise | None = None  # simulated; None: as it was

    @property
    def samples(self) -> int | None:
        """Of a step: its batch, or all batches whose gradients it accumulates."""
        batches = self.batch_reading.per_step if self.batch_reading else None
        return self.batch * batches if self.batch and batches else None

    @property
    def on_host(self) -> bool:
        return self.work.on_host

    @property
    def stalls_ns(self) -> float:
        """What stalls add to an average step."""
        return self.stalls.total_ns if self.stalls else 0.0

    @property
    def task_phase(self) -> NDArray[np.int8]:
        return self.graph.calls.phase[self.graph.tasks.call]

    @cached_property
    def operators(self) -> Operators:
        return find_operators(self.trace, self.graph, self.costs, on_host=self.on_host)

    def named(self, matches: Callable[[str], object]) -> Flags:
        """Tasks whose operator's name matches; an unknown operator has an empty name."""
        names = self.trace.host.name

        def is_match(name: str) -> bool:
            return bool(matches(name))

        return by_text(self.trace, names, self.operators.row, is_match, is_match(""))

    def kernels_named(self, matches: Callable[[str], object]) -> Flags:
        """Tasks whose kernel's name matches."""
        names, rows = self.trace.device.name, self.graph.tasks.row
        return by_text(self.trace, names, rows, lambda name: bool(matches(name)), False)

    @property
    def created_by(self) -> Ints:
        """Of each call in backward: the forward operator that created its node; -1 for none."""
        operator = self.graph.calls.operator
        creator = self.trace.host.forward_of[np.maximum(operator, 0)]
        return np.where(operator >= 0, creator, np.int32(-1))

    @cached_property
    def weight_shapes(self) -> frozenset[tuple[int, ...]]:
        """The shapes of all parameters, each also transposed."""
        shapes = self.parameters.shapes if self.parameters else ()
        return frozenset(shapes) | {shape[::-1] for shape in shapes}


def find_operators(trace: Trace, graph: StepGraph, costs: Costs, *, on_host: bool) -> Operators:
    """Join the graph's tasks to the operators that launched them."""
    tasks = graph.tasks
    from_trace = tasks.row >= 0
    row = np.full(len(tasks), -1, np.int32)
    if not on_host:
        row[from_trace] = costs.operator[tasks.row[from_trace]]
    known = row >= 0
    at = np.maximum(row, 0)

    def of_operator(column: NDArray[Any], absent: int, empty: int = 0) -> NDArray[Any]:
        if not len(trace.host):
            return np.full(len(tasks), empty, column.dtype)
        return np.where(known, column[at], absent)

    counted = of_operator(costs.counted, False)
    flops = of_operator(costs.flops, -1).astype(np.float64)
    flops = np.where(known & ~counted & (flops > 0), 0.0, flops)
    # A graph's kernel has its own part of a call; others share one call of their operator.
    replayed = np.zeros(len(tasks), np.bool_)
    if not on_host:
        replayed[from_trace] = costs.replayed[tasks.row[from_trace]]
    part = np.ones(len(tasks))
    part[replayed] = costs.call_part[tasks.row[replayed]]
    moved = of_operator(costs.bytes_moved, -1).astype(np.float64)
    flops, moved = (np.where(column > 0, column * part, column) for column in (flops, moved))
    group = np.where(known & ~replayed, row, len(trace.host) + np.arange(len(tasks)))
    _, place = distinct_places(group)
    total = np.bincount(place, tasks.dur_ns)[place]
    return Operators(
        row=row,
        flops=flops,
        bytes_moved=moved,
        dtype=of_operator(costs.dtype, -1, empty=-1).astype(np.int8),
        family=_find_families(trace, row, flops),
        recomputed=of_operator(costs.recomputed, False),
        share=np.divide(tasks.dur_ns, total, out=np.ones(len(tasks)), where=total > 0),
    )


def _find_families(trace: Trace, row: Ints, flops: Floats) -> NDArray[np.int8]:
    """Look up each name once per sign of its FLOPs: some, none, not known."""
    known = row >= 0
    families = np.full(len(row), Family.OTHER, np.int8)
    key = trace.host.name[row[known]].astype(np.int64) * 3 + np.sign(flops[known]).astype(int) + 1
    distinct, place = distinct_places(key)
    by_key = [family_of(trace.strings[code // 3], code % 3 - 1) for code in distinct.tolist()]
    families[known] = np.array(by_key, np.int8)[place]
    return families


# Which update rule the step's optimizer follows, and in which form it runs.

_FUSED = re.compile(r"_fused_(?:adam|adamw|sgd|adagrad)", re.IGNORECASE)
_NAME = re.compile(r"^Optimizer\.step#(\w+)\.step$")


def find_rule(context: StepContext) -> UpdateRule:
    """By the name that torch writes around the optimizer's step; Adam's if there is none."""
    host, strings = context.trace.host, context.trace.strings
    codes = distinct(host.name[host.kind == HostKind.ANNOTATION]).tolist()
    names = {match[1] for code in codes if (match := _NAME.match(strings[code]))}
    others = sorted(names - {"Adam", "AdamW", "SGD"})
    if others == ["Adagrad"]:
        return ADAGRAD
    if others:
        return replace(ADAM, name=others[0], fused=False, fused_on_cpu=False)
    if names == {"SGD"}:
        # Plain SGD only adds.
        return MOMENTUM if any("mul_" in name for name in _called(context)) else PLAIN
    return ADAM


def current_form(context: StepContext) -> str | None:
    """By the names of what the optimizer's calls run; None without an optimizer step."""
    if not find_optimizer_calls(context).any():
        return None
    names = _called(context)
    if any(_FUSED.search(name) for name in names):
        return "fused"
    foreach = any("_foreach_" in name or "multi_tensor" in name for name in names)
    return "foreach" if foreach else "loop"


def find_optimizer_calls(context: StepContext) -> Flags:
    calls = context.graph.calls
    updating: Flags = (calls.phase == Phase.OPTIMIZER) & (calls.kind != CallKind.WAIT)
    return updating


def _called(context: StepContext) -> set[str]:
    """Names of the optimizer's operators and kernels."""
    host, device, strings = context.trace.host, context.trace.device, context.trace.strings
    updating = find_optimizer_calls(context)
    rows = context.graph.calls.operator[updating]
    names = {strings[host.name[row]] for row in rows[rows >= 0].tolist()}
    kernels = context.graph.tasks.row[updating[context.graph.tasks.call]]
    if len(device):
        names |= {strings[device.name[row]] for row in kernels[kernels >= 0].tolist()}
    return names
