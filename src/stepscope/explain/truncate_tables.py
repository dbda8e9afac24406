"""Cut a rank's tables to their longest rows: the full tables of very many ranks are too large.

Rows called OTHERS hold the sums of what was cut, so that every column still adds up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.records.compiled import CompiledWork
    from stepscope.records.explanation import RankExplanation

OTHERS = "(others)"
_MAX_SPOTS = 20  # fewer than other rows: a spot has many fields
_MERGED_BY = {"min_ns": min, "max_ns": max}  # all other columns are summed


class _Table(NamedTuple):
    """How the rows of a table become one: every field is a label or a column, or is alike."""

    labels: dict[str, Any]
    columns: str
    alike: Callable[[Any], object] = lambda _: None  # rows that differ in this stay apart


_TABLES = {
    "kernels": _Table(
        {"name": OTHERS},
        "count total_ns min_ns max_ns steps_count steps_ns",
        lambda row: row.kind,  # it decides what the time counts as
    ),
    "operators": _Table(
        {"name": OTHERS, "shapes": "", "dtypes": ""},
        "calls host_total_ns host_self_ns device_total_ns device_self_ns",
    ),
    "modules": _Table(
        {"name": OTHERS}, "calls host_total_ns host_self_ns forward_device_ns backward_device_ns"
    ),
    "lines": _Table(
        {"file": OTHERS, "line": -1, "function": ""}, "calls host_total_ns host_self_ns device_ns"
    ),
    "syncs": _Table({"name": OTHERS, "operator": "", "file": None, "line": None}, "count total_ns"),
    "collectives": _Table(  # sizes differ, so there is no one bandwidth
        dict.fromkeys(("size_bytes", "algbw_gb_s", "busbw_gb_s")),
        "count total_ns exposed_ns",
        lambda row: (row.kind, row.group, row.group_size),
    ),
}
_SPOTS = _Table(
    {"operator": OTHERS, "shapes": "", "dtype": "", "phase": "other"}
    | dict.fromkeys(("intensity", "achieved_flops", "ceiling_flops")),
    "calls device_ns flops bytes_moved roof_ns gap_ns",
    lambda row: (row.recomputed, row.bound, bool(row.flops)),
)
_REGIONS = _Table(
    {"key": OTHERS, "region": None, "flops": None, "not_graphed": None}
    | dict.fromkeys(("lines", "kernel_times", "unfused"), ()),
    "calls ms kernels gaps_ms",
    lambda row: (row.backward, row.captured),
)
_MODULE_BYTES = _Table({"module": OTHERS}, "size_bytes tensors")
_SITE_BYTES = _Table(
    {"operator": OTHERS, "function": ""} | dict.fromkeys(("category", "file", "line")),
    "size_bytes blocks",
)


def truncate_tables(rank: RankExplanation, max_rows: int) -> RankExplanation:
    """Keep the first `max_rows` rows of each table, and the sums of those left out."""
    tables = {name: _cut(getattr(rank, name), max_rows, how) for name, how in _TABLES.items()}
    tables["kernels"] = tuple(sorted(tables["kernels"], key=lambda row: -row.total_ns))
    efficiency, memory = rank.efficiency, rank.memory
    if efficiency is not None:
        spots = _cut(efficiency.spots, min(max_rows, _MAX_SPOTS), _SPOTS)
        efficiency = replace(efficiency, spots=spots)
    if memory is not None:
        memory = replace(
            memory,
            by_module=_cut(memory.by_module, max_rows, _MODULE_BYTES),
            by_site=_cut(memory.by_site, max_rows, _SITE_BYTES),
            timeline=None,
        )
    compiled = rank.compiled and _cut_compiled(rank.compiled, max_rows)
    return replace(rank, efficiency=efficiency, memory=memory, compiled=compiled, **tables)


def _cut_compiled(compiled: CompiledWork, max_rows: int) -> CompiledWork:
    """The rest is summed: one more graph without lines."""
    regions = _cut(compiled.regions, min(max_rows, _MAX_SPOTS), _REGIONS)
    return replace(compiled, regions=regions, breaks=compiled.breaks[:max_rows])


def _cut(rows: tuple[Any, ...], max_rows: int, table: _Table) -> tuple[Any, ...]:
    left_out: dict[object, list[Any]] = {}
    for row in rows[max_rows:]:
        left_out.setdefault(table.alike(row), []).append(row)
    return (*rows[:max_rows], *(_merge(alike, table) for alike in left_out.values()))


def _merge(rows: list[Any], table: _Table) -> Any:
    columns = {name: _merge_column(rows, name) for name in table.columns.split()}
    return replace(rows[0], **table.labels, **columns)


def _merge_column(rows: list[Any], name: str) -> Any:
    """None where one of the values is not known."""
    values = [getattr(row, name) for row in rows]
    return None if None in values else _MERGED_BY.get(name, sum)(values)
