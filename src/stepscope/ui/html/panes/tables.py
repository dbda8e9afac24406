"""The tables of one rank, and of a job's ranks, as plain rows.

A table that is empty because nothing was recorded says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from stepscope.records.explanation import RankExplanation
from stepscope.records.job import Job
from stepscope.records.source_lines import Place
from stepscope.ui.html.pane import Pane
from stepscope.ui.html.render import make_table
from stepscope.ui.topics.distributed import CAUSES, group_words, rank_on_host, straggler_name

if TYPE_CHECKING:
    from stepscope.records.compiled import CompiledWork, RegionTime

NEEDS_STACK = "not captured: record with with_stack=True"
NEEDS_HOST = "not captured: record with ProfilerActivity.CPU"


_SYNC_COLUMNS = "Call:code | Made by:code | Count:count | Total:ns | Where:code"
# title, columns, fields of the rows, the column to sort by, and whether rows name events
_PLAIN = {
    "modules": (
        "Modules",
        "Module:code | Calls:count | Device forward:ns | Device backward:ns | "
        "CPU total:ns | CPU self:ns",
        "name calls forward_device_ns backward_device_ns host_total_ns host_self_ns",
        2,
    ),
    "copies": (
        "Copies",
        "Copy:code | Count:count | Total:ns | Exposed:ns | Size:bytes | Rate:rate",
        "name count total_ns exposed_ns size_bytes gb_s",
        2,
    ),
    "collectives": (
        "Collectives",
        "Collective:code | Group:text | Ranks:count | Size:bytes | Count:count | "
        "Total:ns | Exposed:ns | Bus rate:rate",
        "kind group group_size size_bytes count total_ns exposed_ns busbw_gb_s",
        5,
    ),
}


def _plain(rank: RankExplanation, name: str, absent: str = "") -> dict[str, Any]:
    """A table whose cells are fields of the rank's rows."""
    title, columns, fields, sort = _PLAIN[name]
    rows = map(attrgetter(*fields.split()), getattr(rank, name))
    return make_table(title, columns, rows, sort=sort, absent=absent, events=name == "copies")


def rank_tables(rank: RankExplanation) -> list[dict[str, Any]]:
    """Every table of one rank, in the order of the tabs."""
    syncs = (
        (s.name, s.operator, s.count, s.total_ns, f"{s.file}:{s.line}" if s.file else None)
        for s in rank.syncs
    )
    zero = rank.steps.steps[0].start_ns if rank.steps.steps else 0
    steps = ((s.name, s.start_ns - zero, s.dur_ns) for s in rank.steps.steps)
    return [
        _kernels(rank),
        _operators(rank),
        _plain(rank, "modules", "" if rank.lines else NEEDS_STACK),
        _lines(rank),
        *_compiled_tables(rank.compiled),
        _plain(rank, "copies"),
        make_table("Sync calls", _SYNC_COLUMNS, syncs, sort=3, events=True),
        _plain(rank, "collectives"),
        make_table("Steps", "Step:text | Start:ns | CPU time:ns", steps, sort=-1),
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
    columns = {"name": "Operator:code", "shapes": "Input shapes:code", "calls": "Calls:count"}
    if not any(operator.shapes for operator in rank.operators):
        del columns["shapes"]
    device = rank.kind != "cpu"
    if device:
        columns |= {"device_total_ns": "Device total:ns", "device_self_ns": "Device self:ns"}
    columns |= {"host_total_ns": "CPU total:ns", "host_self_ns": "CPU self:ns"}
    return make_table(
        "Operators",
        " | ".join(columns.values()),
        map(attrgetter(*columns), rank.operators),
        sort=list(columns).index("device_self_ns" if device else "host_self_ns"),
        absent=NEEDS_HOST,
        events=True,
    )


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


PANE = Pane(
    id="tables", title="Tables", order=90, view=lambda report: True if report.is_timed else None
)


# Compiled graphs as tables: by kernel, by line of the source, and where they break.


def _compiled_tables(compiled: CompiledWork | None) -> list[dict[str, Any]]:
    """No tabs where nothing is compiled."""
    if compiled is None:
        return []
    absent = "; ".join(compiled.notes)
    columns = (
        "Graph:text | Kernel:code | Operators:code | Lines:code | Calls:count | Per step:ns | "
        "FLOPs:count | Bytes:bytes"
    )
    kernels = make_table(
        "Compiled kernels", columns, _graph_kernels(compiled), sort=5, absent=absent
    )
    columns = (
        "Graph:text | Line:code | Function:code | Operators:code | Per step:ns | "
        "FLOPs:count | Bytes:bytes"
    )
    tables = [
        kernels,
        make_table("Compiled lines", columns, _graph_lines(compiled), sort=4, absent=absent),
    ]
    if compiled.breaks:
        columns = "Line:code | Reason:text | Per step:count | Cost:ns"
        tables.append(make_table("Graph breaks", columns, _breaks(compiled), sort=3))
    return tables


def _graph_kernels(compiled: CompiledWork) -> Iterator[tuple[Any, ...]]:
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


def _graph_lines(compiled: CompiledWork) -> Iterator[tuple[Any, ...]]:
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


# Tables about several ranks: collectives they share, who is slow, each rank, the clocks.

MOST_ROWS = 1500  # of collectives, the longest first


def job_tables(job: Job) -> list[dict[str, Any]]:
    """In the order of the tabs; their ids differ from those of one rank's tables."""
    tables = [_job_collectives(job), _stragglers(job), _ranks(job), _clocks(job)]
    return [{**table, "id": f"job-{table['id']}"} for table in tables]


def _job_collectives(job: Job) -> dict[str, Any]:
    columns = (
        "Collective:code | Group:text | Reach:text | Ranks:text | Size:bytes | Count:count | "
        "Bus rate:rate | Wait, a call:wait | Transfer, a call:ns | Expected, a call:ns | "
        "Exposed, a call:ns | Exposed in all:ns | Last most often:text"
    )
    rows = []
    for row in job.collectives[:MOST_ROWS]:
        seen = f"{row.ranks_seen}"
        if row.group_size is not None and row.ranks_seen != row.group_size:
            seen += f" of {row.group_size}"
        wait, error, transfer, exposed = (
            None if ns is None else round(ns / row.count)
            for ns in (row.wait_ns, row.wait_error_ns, row.transfer_ns, row.exposed_ns)
        )
        rows.append(
            (
                row.kind,
                group_words(row),
                row.reach or "not known",
                seen,
                row.size_bytes,
                row.count,
                row.busbw_gb_s,
                None if wait is None or error is None else [wait, error],
                transfer,
                None if row.expected_ns is None else round(row.expected_ns),
                exposed,
                row.exposed_ns,
                "" if row.slowest_rank is None else rank_on_host(row.slowest_rank, job),
            )
        )
    return make_table("Collectives", columns, rows, sort=11, absent="not recorded by two ranks")


def _stragglers(job: Job) -> dict[str, Any]:
    columns = (
        "Who:text | Host:text | Cause:text | Slowdown:times | Cost per step:ns | Steps:text | "
        "Evidence:text"
    )
    rows = (
        (
            straggler_name(straggler),
            straggler.host or "",
            CAUSES[straggler.cause],
            straggler.slowdown,
            round(straggler.cost_ms * 1e6),
            f"{straggler.steps} of {straggler.of}",
            "; ".join(straggler.evidence),
        )
        for straggler in job.stragglers.ranks
    )
    return make_table("Stragglers", columns, rows, sort=4)


def _ranks(job: Job) -> dict[str, Any]:
    columns = (
        "Rank:index | Host:text | Profiled step:ns | Without comm:ns | Exposed comm:ns | "
        "Data loading:ns | Waits for others:wait | Arrived last:count"
    )
    arrivals = {
        row.rank: ([row.waits_ns, row.wait_error_ns], row.times_last) for row in job.arrivals
    }
    rows = (
        (
            rank,
            job.hosts.get(rank, ""),
            *(
                round(ms * 1e6)
                for ms in (times.step_ms, times.own_ms, times.exposed_comm_ms, times.input_ms)
            ),
            *arrivals.get(rank, (None, None)),
        )
        for rank, times in zip(job.ranks, job.times, strict=True)
    )
    return make_table("Ranks, per step", columns, rows, sort=3)


def _clocks(job: Job) -> dict[str, Any]:
    columns = "Rank:index | Host:text | Offset:offset | Error:error | Drift:ppm"
    return make_table("Clocks", columns, _clock_rows(job), sort=3, absent="not aligned")


def _clock_rows(job: Job) -> Iterator[tuple[Any, ...]]:
    clock = job.clock
    for rank, offset in clock.offset_ns.items() if clock.aligned else ():
        host = job.hosts.get(rank, "")
        yield rank, host, offset, clock.error_ns.get(rank), clock.drift_ppm.get(rank)
