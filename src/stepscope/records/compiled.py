"""What torch.compile did in one rank: its graphs, compilations and graph breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from stepscope.records.place import Place


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
    nodes: tuple[str, ...] = ()  # what it computes; empty where the code does not say
    size_bytes: int | None = None  # of all tensors that it reads and writes, each once


class CompiledGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A graph that Inductor compiled or took from a cache."""

    key: str  # in the trace: `## Call CompiledFxGraph <key> ##`
    region: str | None = None  # in the trace: `Torch-Compiled Region: 0/0`
    backward: bool = False
    devices: tuple[str, ...] = ()
    not_graphed: str | None = None  # why it is not replayed as a CUDA graph
    operators: tuple[GraphOperator, ...] = ()  # empty: not captured
    kernels: tuple[GraphKernel, ...] = ()


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
