"""All that is known about torch.compile in one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.compiled.breaks import price_breaks
from stepscope.explain.compiled.compilations import (
    compile_seconds,
    count_compiled,
    list_eager,
    list_recompiled,
)
from stepscope.explain.compiled.graph_kernels import share_known
from stepscope.explain.compiled.regions import time_regions
from stepscope.records.compiled import CompiledWork, CompilerRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.compiled import CompiledGraph, RegionTime

_MOSTLY = 0.5  # of the computing: advice to compile comes too late
_BARE = "the compiler's own records were not captured: record with `stepscope run`"


def explain_compiled(analysis: RankAnalysis) -> CompiledWork | None:
    """None for a rank that compiled nothing and ran nothing compiled."""
    record = analysis.inputs.compiler or CompilerRecord()
    regions = time_regions(analysis, record.graphs)
    breaks = price_breaks(analysis, record.breaks)
    if not regions and not breaks and not record.compilations:
        return None
    total, cold, cached = compile_seconds(record.compilations)
    with_operator, with_line = share_known(analysis)
    return CompiledWork(
        compilations=count_compiled(record.compilations) if analysis.inputs.compiler else None,
        compile_s=total,
        cold_s=cold,
        cached_s=cached,
        operator_share=with_operator,
        line_share=with_line,
        regions=regions,
        breaks=breaks,
        recompiled=list_recompiled(record.compilations),
        eager=list_eager(record.compilations),
        notes=tuple(_notes(record, regions)),
    )


def is_mostly_compiled(compiled: CompiledWork | None, computing_ms: float) -> bool:
    """Whether compiled graphs take most of the time in which the device computes."""
    if compiled is None or not computing_ms:
        return False
    return sum(region.ms for region in compiled.regions) >= _MOSTLY * computing_ms


def _notes(record: CompilerRecord, regions: tuple[RegionTime, ...]) -> Iterator[str]:
    if not record.compilations and not record.graphs:
        yield _BARE
    elif regions and not any(region.captured for region in regions):
        yield (
            "graphs were not captured: this version of torch keeps no text of them, or they were "
            "compiled before the capture began"
        )
    if any(_lacks_lines(graph) for graph in record.graphs):
        yield (
            "torch keeps no source lines of what compiled autograd compiles, nor of a container "
            "such as nn.Sequential that is compiled itself"
        )


def _lacks_lines(graph: CompiledGraph) -> bool:
    return bool(graph.operators) and not any(operator.place for operator in graph.operators)
