"""One rank's tables as plain rows. A table that is empty because nothing was recorded says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.ui.html.compiled_tables import compiled_tables
from stepscope.ui.html.pane import Pane
from stepscope.ui.html.table_data import make_table

if TYPE_CHECKING:
    from stepscope.records.explanation import RankExplanation

NEEDS_STACK = "not captured: record with with_stack=True"
NEEDS_HOST = "not captured: record with ProfilerActivity.CPU"


def rank_tables(rank: RankExplanation) -> list[dict[str, Any]]:
    """Every table of one rank, in the order of the tabs."""
    return [
        _kernels(rank),
        _operators(rank),
        _modules(rank),
        _lines(rank),
        *compiled_tables(rank.compiled),
        _copies(rank),
        _syncs(rank),
        _collectives(rank),
        _steps(rank),
    ]


def _kernels(rank: RankExplanation) -> dict[str, Any]:
    columns = "Kernel:code | Kind:kind | Count:count | Total:ns | Mean:ns | Min:ns | Max:ns"
    rows = (
        (k.name, k.kind, k.count, k.total_ns, round(k.total_ns / k.count), k.min_ns, k.max_ns)
        for k in rank.kernels
    )
    if rank.kind == "cpu":
        columns = columns.replace("Kernel", "Operator")
        return make_table("Work on the CPU", columns, rows, sort=3, events=True)
    absent = "not captured: record the device's ProfilerActivity"
    return make_table("Kernels", columns, rows, sort=3, absent=absent, events=True)


def _operators(rank: RankExplanation) -> dict[str, Any]:
    columns = (
        "Operator:code | Input shapes:code | Calls:count | Device total:ns | "
        "Device self:ns | CPU total:ns | CPU self:ns"
    )
    shapes = any(operator.shapes for operator in rank.operators)
    device = rank.kind != "cpu"
    shown = [0, *([1] if shapes else []), 2, *([3, 4] if device else []), 5, 6]
    rows = (
        (
            o.name,
            o.shapes,
            o.calls,
            o.device_total_ns,
            o.device_self_ns,
            o.host_total_ns,
            o.host_self_ns,
        )
        for o in rank.operators
    )
    return make_table(
        "Operators",
        " | ".join(columns.split(" | ")[place] for place in shown),
        (tuple(row[place] for place in shown) for row in rows),
        sort=shown.index(4 if device else 6),
        absent=NEEDS_HOST,
        events=True,
    )


def _modules(rank: RankExplanation) -> dict[str, Any]:
    columns = (
        "Module:code | Calls:count | Device forward:ns | Device backward:ns | "
        "CPU total:ns | CPU self:ns"
    )
    rows = (
        (
            m.name,
            m.calls,
            m.forward_device_ns,
            m.backward_device_ns,
            m.host_total_ns,
            m.host_self_ns,
        )
        for m in rank.modules
    )
    return make_table("Modules", columns, rows, sort=2, absent="" if rank.lines else NEEDS_STACK)


def _lines(rank: RankExplanation) -> dict[str, Any]:
    columns = "Function:code | File:code | Calls:count | CPU self:ns | CPU total:ns | Device:ns"
    rows = (
        (
            line.function,
            f"{line.file}:{line.line}" if line.line >= 0 else line.file,
            line.calls,
            line.host_self_ns,
            line.host_total_ns,
            line.device_ns,
        )
        for line in rank.lines
    )
    return make_table("Python lines", columns, rows, sort=3, absent=NEEDS_STACK)


def _copies(rank: RankExplanation) -> dict[str, Any]:
    columns = "Copy:code | Count:count | Total:ns | Exposed:ns | Size:bytes | Rate:rate"
    rows = ((c.name, c.count, c.total_ns, c.exposed_ns, c.size_bytes, c.gb_s) for c in rank.copies)
    return make_table("Copies", columns, rows, sort=2, events=True)


def _syncs(rank: RankExplanation) -> dict[str, Any]:
    columns = "Call:code | Made by:code | Count:count | Total:ns | Where:code"
    rows = (
        (s.name, s.operator, s.count, s.total_ns, f"{s.file}:{s.line}" if s.file else None)
        for s in rank.syncs
    )
    return make_table("Sync calls", columns, rows, sort=3, events=True)


def _collectives(rank: RankExplanation) -> dict[str, Any]:
    columns = (
        "Collective:code | Group:text | Ranks:count | Size:bytes | Count:count | "
        "Total:ns | Exposed:ns | Bus rate:rate"
    )
    rows = (
        (
            c.kind,
            c.group,
            c.group_size,
            c.size_bytes,
            c.count,
            c.total_ns,
            c.exposed_ns,
            c.busbw_gb_s,
        )
        for c in rank.collectives
    )
    return make_table("Collectives", columns, rows, sort=5)


def _steps(rank: RankExplanation) -> dict[str, Any]:
    columns = "Step:text | Start:ns | CPU time:ns"
    zero = rank.steps.steps[0].start_ns if rank.steps.steps else 0
    rows = ((s.name, s.start_ns - zero, s.dur_ns) for s in rank.steps.steps)
    return make_table("Steps", columns, rows, sort=-1)


PANE = Pane(
    id="tables", title="Tables", order=90, view=lambda report: True if report.is_timed else None
)
