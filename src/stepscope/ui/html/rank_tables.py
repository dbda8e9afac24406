"""Tables about several ranks: collectives they share, who is slow, each rank, the clocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.ui.distributed import CAUSES, group_words, rank_on_host, straggler_name
from stepscope.ui.html.table_data import make_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.records.job import Job, JobCollective

MOST_ROWS = 1500  # of collectives, the longest first


def job_tables(job: Job) -> list[dict[str, Any]]:
    """In the order of the tabs; their ids differ from those of one rank's tables."""
    tables = [_collectives(job), _stragglers(job), _ranks(job), _clocks(job)]
    return [{**table, "id": f"job-{table['id']}"} for table in tables]


def _collectives(job: Job) -> dict[str, Any]:
    columns = (
        "Collective:code | Group:text | Reach:text | Ranks:text | Size:bytes | Count:count | "
        "Bus rate:rate | Wait, a call:wait | Transfer, a call:ns | Expected, a call:ns | "
        "Exposed, a call:ns | Exposed in all:ns | Last most often:text"
    )
    rows = (
        (
            row.kind,
            group_words(row),
            row.reach or "not known",
            _ranks_seen(row),
            row.size_bytes,
            row.count,
            row.busbw_gb_s,
            _wait(row),
            _per_call(row.transfer_ns, row),
            None if row.expected_ns is None else round(row.expected_ns),
            _per_call(row.exposed_ns, row),
            row.exposed_ns,
            "" if row.slowest_rank is None else rank_on_host(row.slowest_rank, job),
        )
        for row in job.collectives[:MOST_ROWS]
    )
    return make_table("Collectives", columns, rows, sort=11, absent="not recorded by two ranks")


def _ranks_seen(row: JobCollective) -> str:
    if row.group_size is None or row.ranks_seen == row.group_size:
        return f"{row.ranks_seen}"
    return f"{row.ranks_seen} of {row.group_size}"


def _per_call(total_ns: int | None, row: JobCollective) -> int | None:
    return None if total_ns is None else round(total_ns / row.count)


def _wait(row: JobCollective) -> list[int] | None:
    """The wait and its error bar."""
    if row.wait_ns is None or row.wait_error_ns is None:
        return None
    return [round(row.wait_ns / row.count), round(row.wait_error_ns / row.count)]


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
