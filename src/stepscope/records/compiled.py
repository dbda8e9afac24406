"""What torch.compile did in one rank: its graphs, compilations and graph breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from stepscope.records.source_lines import Place


# Operators that only give a tensor another shape or other strides.
_VIEWS = (
    "_reshape_alias _unsafe_view alias as_strided detach diagonal expand permute reshape select "
    "slice split split_with_sizes squeeze t transpose unbind unfold unsqueeze view view_as_real"
)
GRAPH_VIEWS = frozenset(f"aten::{word}" for word in _VIEWS.split())
_MOSTLY = 0.5


class GraphOperator(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a compiled graph. Arguments are described as the profiler describes a call's."""

    node: str
    name: str  # as in a trace: aten::mm
    shapes: list[Any]
    dtypes: list[str]
    concrete: list[str]
    inputs: tuple[str, ...] = ()  # nodes that it reads
    size_bytes: int | None = None  # of its result; None for several results and symbolic sizes
    place: Place | None = None


class GraphKernel(msgspec.Struct, frozen=True, kw_only=True):
    """One call in the code that Inductor wrote."""

    name: str  # triton_poi_fused_gelu_0, cpp_fused_add_1, extern_kernels.mm
    operator: str | None = None  # of a library's call, as in a trace: aten::mm
    nodes: tuple[str, ...] = ()  # operators of the graph that it computes; empty: not known
    size_bytes: int | None = None  # of all tensors that it reads and writes, each once
    shared_bytes: int = 0  # of tensors that the call before it made or read, if both are loops


class CompiledGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A graph that Inductor compiled or took from a cache."""

    key: str  # in the trace: `## Call CompiledFxGraph <key> ##`
    region: str | None = None  # in the trace: `Torch-Compiled Region: 0/0`
    backward: bool = False
    devices: tuple[str, ...] = ()
    not_graphed: str | None = None  # why it is not replayed as a CUDA graph
    operators: tuple[GraphOperator, ...] = ()  # empty: not captured
    kernels: tuple[GraphKernel, ...] = ()


class CapturedOperator(msgspec.Struct, frozen=True, kw_only=True):
    """One operator that a CUDA graph recorded, described as the profiler describes a call."""

    name: str  # aten::mm
    shapes: list[Any]
    dtypes: list[str]
    concrete: list[str]
    backward: bool = False
    optimizer: bool = False  # inside an optimizer's step
    place: Place | None = None  # of a backward operator: the line of its forward


class CapturedGraph(msgspec.Struct, frozen=True, kw_only=True):
    """What a CUDA graph recorded, in order; its replays launch the kernels of these operators."""

    operators: tuple[CapturedOperator, ...] = ()


class Compilation(msgspec.Struct, frozen=True, kw_only=True):
    """One time that dynamo compiled a function, or tried to."""

    region: str | None
    function: str | None
    place: Place | None
    seconds: float | None
    began_unix_s: float | None = None
    cached: bool | None = None  # all its graphs came from a cache; None: not known
    again: bool = False  # the function had been compiled before
    guard: str | None = None  # what no longer held, when compiled again
    guard_place: Place | None = None
    failed: str | None = None  # why the function runs without being compiled


class GraphBreak(msgspec.Struct, frozen=True, kw_only=True):
    """A line that dynamo cannot trace: the graph ends there."""

    reason: str  # one line
    hint: str = ""  # torch's own advice
    place: Place | None
    function: Place | None = None  # the outermost line of the same function: where it resumes
    regions: tuple[str, ...] = ()  # compilations that ended there
    times: int = 1


class CompilerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """compiler.jsonl."""

    graphs: tuple[CompiledGraph, ...] = ()
    compilations: tuple[Compilation, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()


class BreakCost(msgspec.Struct, frozen=True, kw_only=True):
    """A graph break and what it costs each step."""

    reason: str
    hint: str = ""
    place: Place | None
    times: float | None  # per step; None where the trace does not show it
    cost_ms: float | None  # per step: from the end of one graph to the beginning of the next


class RegionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the model's source in a compiled graph."""

    place: Place
    operators: tuple[str, ...]  # most FLOPs and bytes first
    flops: int | None  # of one run
    bytes_moved: int  # by operators one by one: what is fused moves less
    share: float | None  # of the graph's time; estimated inside a kernel (docs/reference/json.md)


class KernelTime(msgspec.Struct, frozen=True, kw_only=True):
    """One call in a compiled graph's code, and what it takes of the step."""

    name: str
    operators: tuple[str, ...]  # that it fuses, the costliest first; empty: not known
    places: tuple[Place, ...]  # their lines, the longest first
    calls: float  # per step
    ms: float  # per step: on the device; on a CPU, loops without an operator between them share
    flops: int | None  # of one call
    bytes_moved: int | None  # of all tensors that one call reads and writes


class UnfusedPair(msgspec.Struct, frozen=True, kw_only=True):
    """Two loops over elements, one after the other, that touch the same tensors."""

    first: str
    second: str
    size_bytes: int  # of those tensors: read twice, once would do
    ms: float | None  # per step, at the memory's rate; None where that is not known


class RegionTime(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled graph in the step."""

    key: str
    region: str | None
    backward: bool
    calls: float  # per step
    ms: float  # per step: on the device, or on the host where it computes
    flops: int | None  # of one run
    kernels: int  # that one run calls
    gaps_ms: float | None = None  # per step: the device waits between them; None on the CPU
    captured: bool  # its operators are known
    not_graphed: str | None = None
    lines: tuple[RegionLine, ...] = ()
    kernel_times: tuple[KernelTime, ...] = ()  # the longest first
    unfused: tuple[UnfusedPair, ...] = ()  # the largest first


class FailedGuard(msgspec.Struct, frozen=True, kw_only=True):
    guard: str
    place: Place | None
    times: int


class Recompiled(msgspec.Struct, frozen=True, kw_only=True):
    """A function that was compiled more than once."""

    function: str
    place: Place | None
    times: int  # compilations after the first
    seconds: float
    guards: tuple[FailedGuard, ...]  # the most frequent first
    gave_up: bool = False  # torch runs it without compiling since


class RunsEager(msgspec.Struct, frozen=True, kw_only=True):
    """A function that torch tried to compile and runs as it is."""

    function: str
    place: Place | None
    reason: str


class CompiledWork(msgspec.Struct, frozen=True, kw_only=True):
    """What torch.compile did in a rank, and what its graphs take of the step."""

    compilations: int | None
    compile_s: float | None
    cold_s: float | None  # of that, what no cache had
    cached_s: float | None
    operator_share: float | None = None  # of the device's time, or of the graphs' on a CPU
    line_share: float | None = None  # the same with a line of the source
    regions: tuple[RegionTime, ...] = ()  # most time first
    breaks: tuple[BreakCost, ...] = ()  # the costliest first
    recompiled: tuple[Recompiled, ...] = ()
    eager: tuple[RunsEager, ...] = ()
    notes: tuple[str, ...] = ()  # what was not captured

    def is_most_of(self, computing_ms: float) -> bool:
        """Whether compiled graphs take most of the time in which the device computes: advice to
        compile comes too late."""
        return (
            bool(computing_ms)
            and sum(region.ms for region in self.regions) >= _MOSTLY * computing_ms
        )
