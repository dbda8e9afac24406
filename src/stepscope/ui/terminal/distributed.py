"""Several ranks in a terminal: who holds the others back, how well clocks agree, where they wait.

The table of ranks has each rank's numbers; these are the numbers of the whole job.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from rich.text import Text

from stepscope.explain.hosts import columns_by_host
from stepscope.records.figures import byte_rate, duration, milliseconds, significant, size
from stepscope.records.words import counted, number_ranges
from stepscope.ui.distributed import (
    clock_words,
    group_words,
    host_clock_words,
    no_arrivals,
    path_words,
    place_words,
    straggler_tone,
    straggler_words,
    wait_words,
)
from stepscope.ui.terminal.tables import labelled_grid, titled_table
from stepscope.ui.words import one_line, or_dash, short_kernel

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from stepscope.records.job import Job, JobCollective

MOST_LAST = 5
MOST_HOSTS = 12
_HOST_TIMES = ("own_ms", "exposed_comm_ms")
_STYLES = {"good": "green", "bad": "bold red", "open": "yellow"}


def job_sections(job: Job, top: int, width: int) -> list[RenderableType]:
    """A few sentences, then the collectives that ranks share."""
    out: list[RenderableType] = [_lines(job), Text()]
    if job.collectives:
        out += [_collectives(job, min(top, 6), width), Text()]
    if job.links:
        out += [_links(job, top), Text()]
    return out


def _links(job: Job, top: int) -> Table:
    """The slowest first."""
    table = titled_table("links between hosts", "from", "to", ">rate", ">round trip", ">resent")
    for link in job.links[:top]:
        trip = or_dash(link.rtt_us, lambda us: duration(1e3 * us))
        rate = byte_rate(link.rate_bytes_s)
        table.add_row(link.sender, link.receiver, rate, trip, f"{link.retransmitted:,}")
    return table


def _lines(job: Job) -> Table:
    grid = labelled_grid()
    verdict = Text(straggler_words(job.stragglers), style=_STYLES[straggler_tone(job.stragglers)])
    grid.add_row("stragglers", verdict)
    grid.add_row("clock", clock_words(job.clock))
    about_hosts = host_clock_words(job.clock)
    if about_hosts:
        grid.add_row("", about_hosts)
    if job.path is not None:
        grid.add_row("critical path", f"step {job.path.step}: {path_words(job.path)}")
    grid.add_row("arrives last", _last(job))
    return grid


def host_table(job: Job) -> Table | None:
    """Hosts with their ranks, the slowest first; None unless there are several with more ranks
    than hosts."""
    by_host = columns_by_host(job.ranks, job.hosts)
    if not by_host or len(by_host) == len(job.ranks):
        return None
    own, comm = ([getattr(times, name) for times in job.times] for name in _HOST_TIMES)
    rows = sorted(
        ((median(own[i] for i in host.columns), host) for host in by_host),
        key=lambda row: -row[0],
    )
    table = titled_table("hosts, their ranks' medians", "host", "ranks", ">w/o comm", ">comm", "")
    for typical, host in rows[:MOST_HOSTS]:
        slowest = max(host.columns, key=lambda i: own[i])
        table.add_row(
            one_line(host.host),
            number_ranges([job.ranks[i] for i in host.columns]),
            milliseconds(typical),
            milliseconds(median(comm[i] for i in host.columns)),
            f"slowest: rank {job.ranks[slowest]}, {milliseconds(own[slowest])}"
            + (f"  {where}" if (where := place_words(job.places.get(host.host))) else ""),
        )
    if len(rows) > MOST_HOSTS:
        table.caption = f"… {len(rows) - MOST_HOSTS} more, faster"
        table.caption_justify = "left"
        table.caption_style = "bright_black"
    return table


def _last(job: Job) -> str:
    absent = no_arrivals(job)
    if absent:
        return f"not known: {absent}"
    last = [
        f"rank {row.rank} {counted(row.times_last, 'time')} by {duration(row.lead_ns)}"
        for row in job.arrivals[:MOST_LAST]
        if row.times_last
    ]
    others = sum(row.times_last > 0 for row in job.arrivals[MOST_LAST:])
    more = f", {counted(others, 'more rank')}" if others else ""
    return f"{', '.join(last)}{more}; of {counted(job.arrivals[0].of, 'collective')}"


def _collectives(job: Job, top: int, width: int) -> Table:
    """A narrow terminal shows only the columns that matter most."""
    shown = [(name, words) for name, least, words in _COLUMNS if width >= least]
    table = titled_table("collectives in the window, mean of a call", *(name for name, _ in shown))
    for row in job.collectives[:top]:
        table.add_row(*(words(row) for _, words in shown))
    if len(job.collectives) > top:
        table.caption = f"… {len(job.collectives) - top} more: see --json or --html"
        table.caption_justify = "left"
        table.caption_style = "bright_black"
    return table


def _mean(total_ns: int | None, count: int) -> str:
    return "-" if total_ns is None else duration(total_ns / count)


_Words = Callable[["JobCollective"], str]
# name, narrowest terminal that shows it, content
_COLUMNS: tuple[tuple[str, int, _Words], ...] = (
    ("kind", 0, lambda row: row.kind),
    ("group", 96, lambda row: short_kernel(group_words(row), 12)),
    ("reach", 110, lambda row: row.reach or "-"),
    (">size", 0, lambda row: or_dash(row.size_bytes, size)),
    (">calls", 70, lambda row: str(row.count)),
    (">GB/s", 96, lambda row: or_dash(row.busbw_gb_s, significant)),
    (">wait", 0, wait_words),
    (">transfer", 0, lambda row: _mean(row.transfer_ns, row.count)),
    (">expected", 96, lambda row: or_dash(row.expected_ns, duration)),
    (">exposed", 80, lambda row: _mean(row.exposed_ns, row.count)),
)
