"""A rank's tables cut to their longest rows, for jobs of so many ranks that all rows are too many.

What is cut is summed in rows called OTHERS, so that a column still adds up to what it did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from stepscope.records.efficiency import Spot
from stepscope.records.explanation import (
    Collective,
    Kernel,
    Module,
    Operator,
    PythonFunction,
    SyncCall,
)
from stepscope.records.memory import ModuleBytes, SiteBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stepscope.records.efficiency import Bound, Efficiency
    from stepscope.records.explanation import RankExplanation
    from stepscope.records.memory import Memory

OTHERS = "(others)"
_MOST_SPOTS = 20
_Row = TypeVar("_Row")


def truncate_tables(rank: RankExplanation, max_rows: int) -> RankExplanation:
    """At most so many rows in each table, and the sums of those left out."""
    return replace(
        rank,
        kernels=_cut(rank.kernels, max_rows, _kernels, lambda row: row.total_ns),
        operators=_cut(rank.operators, max_rows, _operators),
        modules=_cut(rank.modules, max_rows, _modules),
        lines=_cut(rank.lines, max_rows, _lines),
        syncs=_cut(rank.syncs, max_rows, _syncs),
        collectives=_cut(rank.collectives, max_rows, _collectives),
        efficiency=_efficiency(rank.efficiency, max_rows),
        memory=_memory(rank.memory, max_rows),
    )


def _cut(
    rows: tuple[_Row, ...],
    most: int,
    others: Callable[[tuple[_Row, ...]], Iterable[_Row]],
    longest_first: Callable[[_Row], int] | None = None,
) -> tuple[_Row, ...]:
    if len(rows) <= most:
        return rows
    out = (*rows[:most], *others(rows[most:]))
    return tuple(sorted(out, key=longest_first, reverse=True)) if longest_first else out


def _efficiency(efficiency: Efficiency | None, most: int) -> Efficiency | None:
    """The widest gaps, fewer than other rows: a spot has many fields."""
    if efficiency is None:
        return None
    return replace(efficiency, spots=_cut(efficiency.spots, min(most, _MOST_SPOTS), _spots))


def _memory(memory: Memory | None, most: int) -> Memory | None:
    """The largest modules and places, and no timeline; bytes by category stand beside them."""
    if memory is None:
        return None
    return replace(
        memory,
        by_module=_cut(memory.by_module, most, _module_bytes),
        by_site=_cut(memory.by_site, most, _site_bytes),
        timeline=None,
    )


def _module_bytes(rows: tuple[ModuleBytes, ...]) -> Iterable[ModuleBytes]:
    yield ModuleBytes(module=OTHERS, **_sums(rows, "size_bytes", "tensors"))


def _site_bytes(rows: tuple[SiteBytes, ...]) -> Iterable[SiteBytes]:
    yield SiteBytes(operator=OTHERS, **_sums(rows, "size_bytes", "blocks"))


def _sums(rows: Iterable[Any], *names: str) -> dict[str, Any]:
    return {name: sum(getattr(row, name) for row in rows) for name in names}


def _kernels(rows: tuple[Kernel, ...]) -> Iterable[Kernel]:
    """One for each kind, since the kind decides what the time counts as."""
    for kind in ("compute", "comm", "memory"):
        mine = [row for row in rows if row.kind == kind]
        if mine:
            yield Kernel(
                name=OTHERS,
                kind=mine[0].kind,
                min_ns=min(row.min_ns for row in mine),
                max_ns=max(row.max_ns for row in mine),
                **_sums(mine, "count", "total_ns"),
                **(
                    _sums(mine, "steps_count", "steps_ns")
                    if mine[0].steps_count is not None
                    else {}
                ),
            )


def _operators(rows: tuple[Operator, ...]) -> Iterable[Operator]:
    times = ("host_total_ns", "host_self_ns", "device_total_ns", "device_self_ns")
    yield Operator(name=OTHERS, shapes="", dtypes="", **_sums(rows, "calls", *times))


def _modules(rows: tuple[Module, ...]) -> Iterable[Module]:
    times = ("host_total_ns", "host_self_ns", "forward_device_ns", "backward_device_ns")
    yield Module(name=OTHERS, **_sums(rows, "calls", *times))


def _lines(rows: tuple[PythonFunction, ...]) -> Iterable[PythonFunction]:
    times = ("host_total_ns", "host_self_ns", "device_ns")
    yield PythonFunction(file=OTHERS, line=-1, function="", **_sums(rows, "calls", *times))


def _syncs(rows: tuple[SyncCall, ...]) -> Iterable[SyncCall]:
    yield SyncCall(name=OTHERS, operator="", **_sums(rows, "count", "total_ns"))


def _spots(rows: tuple[Spot, ...]) -> Iterable[Spot]:
    """One for each kind of time that is told apart in sums over spots."""
    alike: dict[tuple[bool, Bound, bool], list[Spot]] = {}
    for row in rows:
        alike.setdefault((row.recomputed, row.bound, bool(row.flops)), []).append(row)
    for (recomputed, bound, _), mine in alike.items():
        yield Spot(
            operator=OTHERS,
            shapes="",
            dtype="",
            intensity=None,
            achieved_flops=None,
            ceiling_flops=None,
            bound=bound,
            phase="other",
            recomputed=recomputed,
            flops=_sum_if_all_known(mine, "flops"),
            bytes_moved=_sum_if_all_known(mine, "bytes_moved"),
            roof_ns=_sum_if_all_known(mine, "roof_ns"),
            gap_ns=_sum_if_all_known(mine, "gap_ns"),
            **_sums(mine, "calls", "device_ns"),
        )


def _sum_if_all_known(rows: Iterable[Spot], name: str) -> float | None:
    values = [getattr(row, name) for row in rows]
    return None if None in values else sum(values)


def _collectives(rows: tuple[Collective, ...]) -> Iterable[Collective]:
    """One for each kind and group: sizes differ, so there is no one bandwidth."""
    alike: dict[tuple[str, str, int | None], list[Collective]] = {}
    for row in rows:
        alike.setdefault((row.kind, row.group, row.group_size), []).append(row)
    for (kind, group, group_size), mine in alike.items():
        yield Collective(
            kind=kind,
            group=group,
            group_size=group_size,
            size_bytes=None,
            algbw_gb_s=None,
            busbw_gb_s=None,
            **_sums(mine, "count", "total_ns", "exposed_ns"),
        )
