"""Compiled graphs as tables: by kernel, by line of the source, and where they break."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from stepscope.ui.html.table_data import make_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.records.compiled import CompiledWork, RegionTime
    from stepscope.records.place import Place


def compiled_tables(compiled: CompiledWork | None) -> list[dict[str, Any]]:
    """No tabs where nothing is compiled."""
    if compiled is None:
        return []
    absent = "; ".join(compiled.notes)
    columns = (
        "Graph:text | Kernel:code | Operators:code | Lines:code | Calls:count | Per step:ns | "
        "FLOPs:count | Bytes:bytes"
    )
    kernels = make_table("Compiled kernels", columns, _kernels(compiled), sort=5, absent=absent)
    columns = (
        "Graph:text | Line:code | Function:code | Operators:code | Per step:ns | "
        "FLOPs:count | Bytes:bytes"
    )
    tables = [
        kernels,
        make_table("Compiled lines", columns, _lines(compiled), sort=4, absent=absent),
    ]
    if compiled.breaks:
        columns = "Line:code | Reason:text | Per step:count | Cost:ns"
        tables.append(make_table("Graph breaks", columns, _breaks(compiled), sort=3))
    return tables


def _kernels(compiled: CompiledWork) -> Iterator[tuple[Any, ...]]:
    """FLOPs and bytes of one call."""
    for region in compiled.regions:
        for kernel in region.kernel_times:
            yield (
                _graph(region),
                kernel.name,
                _short(kernel.operators),
                ", ".join(map(_where, kernel.places)),
                kernel.calls,
                round(1e6 * kernel.ms),
                kernel.flops,
                kernel.bytes_moved,
            )


def _lines(compiled: CompiledWork) -> Iterator[tuple[Any, ...]]:
    """FLOPs and bytes of one run of the graph."""
    for region in compiled.regions:
        for line in region.lines:
            yield (
                _graph(region),
                _where(line.place),
                line.place.function,
                _short(line.operators),
                round(1e6 * region.ms * (line.share or 0.0)),
                line.flops,
                line.bytes_moved,
            )


def _breaks(compiled: CompiledWork) -> Iterator[tuple[Any, ...]]:
    for one in compiled.breaks:
        cost_ns = None if one.cost_ms is None else round(1e6 * one.cost_ms)
        yield _where(one.place) if one.place else None, one.reason, one.times, cost_ns


def _graph(region: RegionTime) -> str:
    return f"{region.region or '?'} {'backward' if region.backward else 'forward'}"


def _where(place: Place) -> str:
    """With its folder: the end of a long path says most."""
    return f"{'/'.join(PurePath(place.file).parts[-2:])}:{place.line}"


def _short(operators: tuple[str, ...]) -> str:
    return ", ".join(name.removeprefix("aten::") for name in operators)
