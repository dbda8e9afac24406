"""Print what is known of several ranks: who holds the others back, clocks, strategies,
NCCL's logs, and a parameter server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.explain.job.hosts import columns_by_host
from stepscope.explain.parameter_server import describe_staleness
from stepscope.records.explanation import NcclSummary
from stepscope.records.job import HierarchicalAllReduce, Job, JobCollective
from stepscope.records.nccl import Choice, CommunicatorRow
from stepscope.records.parameter_server import TogetherSummary
from stepscope.records.strategies import Strategy
from stepscope.text.figures import byte_rate, duration, milliseconds, significant, size
from stepscope.text.words import counted, short_ranges
from stepscope.ui.terminal.console import (
    FAINT,
    cut,
    labelled_grid,
    note_line,
    text_line,
    titled_table,
)
from stepscope.ui.topics.distributed import (
    clock_words,
    describe_hierarchical,
    describe_strategies,
    group_words,
    host_clock_words,
    no_arrivals,
    path_words,
    place_words,
    straggler_tone,
    straggler_words,
    wait_words,
)
from stepscope.ui.topics.whatif import (
    block_table,
    histogram_rows,
    server_table,
    together_line,
    worker_table,
)
from stepscope.ui.words import one_line, or_dash, short_kernel

# The table of ranks has each rank's numbers; these are the numbers of the whole job.

MOST_LAST = 5
MOST_HOSTS = 12
_STYLES = {"good": "green", "bad": "bold red", "open": "yellow"}


def job_sections(job: Job, top: int, width: int) -> Iterator[RenderableType]:
    """A few sentences, then the collectives that ranks share, and the slowest links."""
    grid = labelled_grid()
    verdict = Text(straggler_words(job.stragglers), style=_STYLES[straggler_tone(job.stragglers)])
    grid.add_row("stragglers", verdict)
    grid.add_row("clock", clock_words(job.clock))
    if about_hosts := host_clock_words(job.clock):
        grid.add_row("", about_hosts)
    if job.path is not None:
        grid.add_row("critical path", f"step {job.path.step}: {path_words(job.path)}")
    grid.add_row("arrives last", _last(job))
    yield from (grid, Text())
    if job.collectives:
        yield from (_collectives(job, min(top, 6), width), Text())
    if job.links:
        rows = [
            (
                link.sender,
                link.receiver,
                byte_rate(link.rate_bytes_s),
                or_dash(link.rtt_us, lambda us: duration(1e3 * us)),
                f"{link.retransmitted:,}",
            )
            for link in job.links[:top]
        ]
        columns = ("from", "to", ">rate", ">round trip", ">resent")
        yield from (titled_table("links between hosts", *columns, rows=rows), Text())


def host_table(job: Job) -> Table | None:
    """Hosts with their ranks, the slowest first; None unless there are several with more ranks
    than hosts."""
    by_host = columns_by_host(job.ranks, job.hosts)
    if not by_host or len(by_host) == len(job.ranks):
        return None
    own = [times.own_ms for times in job.times]
    comm = [times.exposed_comm_ms for times in job.times]
    typical = {host.host: median(own[i] for i in host.columns) for host in by_host}
    rows = []
    for host in sorted(by_host, key=lambda host: -typical[host.host])[:MOST_HOSTS]:
        slowest = max(host.columns, key=lambda i: own[i])
        where = place_words(job.places.get(host.host))
        rows.append(
            (
                one_line(host.host),
                short_ranges([job.ranks[i] for i in host.columns]),
                milliseconds(typical[host.host]),
                milliseconds(median(comm[i] for i in host.columns)),
                f"slowest: rank {job.ranks[slowest]}, {milliseconds(own[slowest])}"
                + (f"  {where}" if where else ""),
            )
        )
    columns = ("host", "ranks", ">w/o comm", ">comm", "")
    left = len(by_host) - MOST_HOSTS
    more = f"… {left} more, faster" if left > 0 else ""
    return titled_table("hosts, their ranks' medians", *columns, rows=rows, more=more)


def _last(job: Job) -> str:
    if absent := no_arrivals(job):
        return f"not known: {absent}"
    last = [
        f"rank {row.rank} {counted(row.times_last, 'time')} by {duration(row.lead_ns)}"
        for row in job.arrivals[:MOST_LAST]
        if row.times_last
    ]
    others = sum(row.times_last > 0 for row in job.arrivals[MOST_LAST:])
    more = f", {counted(others, 'more rank')}" if others else ""
    return f"{', '.join(last)}{more}; of {counted(job.arrivals[0].of, 'collective')}"


def _mean(total_ns: int | None, count: int) -> str:
    return or_dash(total_ns, lambda ns: duration(ns / count))


# name, narrowest terminal that shows it, content
_COLUMNS: tuple[tuple[str, int, Callable[[JobCollective], str]], ...] = (
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


def _collectives(job: Job, top: int, width: int) -> Table:
    """A narrow terminal shows only the columns that matter most."""
    shown = [(name, words) for name, least, words in _COLUMNS if width >= least]
    left = len(job.collectives) - top
    return titled_table(
        "collectives in the window, mean of a call",
        *(name for name, _ in shown),
        rows=[[words(row) for _, words in shown] for row in job.collectives[:top]],
        more=f"… {left} more: see --json or --html" if left > 0 else "",
    )


# How the job is spread over its ranks: a heading and a table per strategy.

_LEFT = ("what", "block", "module", "why", "group", "from", "")


def strategy_sections(
    strategies: Sequence[Strategy],
    hierarchical: Sequence[HierarchicalAllReduce] = (),
    *,
    top: int = 8,
    width: int = 100,
) -> Iterator[RenderableType]:
    for section in (
        *describe_strategies(strategies, top),
        *describe_hierarchical(hierarchical, top),
    ):
        yield Text.assemble((section.title, "bold"), "  ", section.heading)
        if section.columns:
            columns = [name if name in _LEFT else f">{name}" for name in section.columns]
            room = max(16, width - 60)
            rows = [(*row[:-1], short_kernel(row[-1], room)) for row in section.rows]
            yield titled_table("", *columns, rows=rows, folded=())
        if section.note:
            yield Text(section.note, style=FAINT)
        yield Text()


# NCCL's logs: communicators, connections between ranks, algorithms.

_NARROW = 80


def nccl_sections(
    summary: NcclSummary, *, top: int = 8, width: int = 100
) -> Iterator[RenderableType]:
    """Tables for the end of a job's explanation; the explanation shows the findings."""
    hosts = len({process.host for process in summary.processes})
    facts = [
        ", ".join(summary.versions) or "NCCL",
        counted(len(summary.processes), "process", "processes"),
        counted(hosts, "host"),
        counted(summary.calls, "call"),
    ]
    yield from (text_line(" · ".join(facts), style=FAINT), Text())
    columns = ["id", ">ranks", ">hosts", ">channels", ">calls", "transports"]
    id_room = 12 if width < _NARROW else 20
    rows = [_communicator(row, id_room) for row in summary.communicators]
    yield from (_first_rows("communicators", columns, rows, top), Text())
    if summary.transports:
        columns = [">pairs", ">channels", "where", "transport"]
        rows = _transports(summary)
        yield from (_first_rows("connections between ranks", columns, rows, top), Text())
    if summary.choices:
        columns = [">calls", ">size", ">channels", "kind", "algorithm"]
        rows = list(map(_choice, summary.choices))
        yield from (_first_rows("algorithms (rank 0)", columns, rows, top), Text())
    if summary.settings:
        settings = [
            (name, ", ".join(values[:4]) + (f" and {left} more" if left > 0 else ""))
            for name, values in summary.settings.items()
            for left in (len(values) - 4,)
        ]
        yield from (titled_table("environment", "name", "value", rows=settings), Text())
    yield from map(note_line, summary.notes)


def _first_rows(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], top: int
) -> Table:
    """A last row says how many are left out."""
    left = len(rows) - top
    more = [("…", *[""] * (len(columns) - 2), f"{left} more")] if left > 0 else []
    return titled_table(title, *columns, rows=[*rows[:top], *more])


def _communicator(row: CommunicatorRow, id_room: int) -> tuple[str, ...]:
    seen = "" if row.ranks_seen == row.nranks else f"{row.ranks_seen} of "
    return (
        cut(row.id, id_room),
        f"{seen}{'?' if row.nranks is None else row.nranks}",
        str(row.nodes or len(row.hosts)),
        " or ".join(map(str, row.channels)) or "-",
        str(row.calls),
        ", ".join(row.transports) or ("-" if row.complete else "never initialised"),
    )


def _transports(summary: NcclSummary) -> list[tuple[str, ...]]:
    """Pairs of ranks by transport and reach, the most pairs first."""
    reach = {None: "-", True: "within a host", False: "between hosts"}
    merged: dict[tuple[str, str], tuple[int, int]] = {}
    for row in summary.transports:
        key = row.transport, reach[row.within_host]
        pairs, channels = merged.get(key, (0, 0))
        merged[key] = pairs + row.pairs, max(channels, row.channels)
    ordered = sorted(merged.items(), key=lambda item: -item[1][0])
    return [
        (str(pairs), str(channels), where, transport)
        for (transport, where), (pairs, channels) in ordered
    ]


def _choice(choice: Choice) -> tuple[str, ...]:
    first, last = choice.first_channel, choice.last_channel
    return (
        str(choice.count),
        size(choice.size_bytes),
        "-" if first is None or last is None else str(last - first + 1),
        choice.kind or "-",
        f"{choice.algorithm} {choice.protocol}",
    )


# Training through a parameter server.

_BAR = 40  # characters of the longest bar
_MOST_WORKERS = 16


def together_sections(summary: TogetherSummary, top: int) -> Iterator[RenderableType]:
    workers, shards = len(summary.workers), len(summary.shards)
    title = f"parameter server: {counted(workers, 'worker')}, {counted(shards, 'shard')}"
    yield text_line(title, style="bold")
    yield from (Text(together_line(summary)), Text(summary.why), Text())
    title, columns, rows = worker_table(summary.workers[:_MOST_WORKERS]).for_terminal()
    more = [["…", f"{workers - _MOST_WORKERS} more"]] if workers > _MOST_WORKERS else []
    yield from (titled_table(title, *columns, rows=[*rows, *more]), Text())
    blocks = [block_table(summary.blocks[:top]).for_terminal()] if summary.blocks else []
    for title, columns, rows in [*blocks, server_table(summary.shards).for_terminal()]:
        yield from (titled_table(title, *columns, rows=rows), Text())
    if summary.staleness.pulls:
        pulls = histogram_rows(summary.staleness)
        most = max(count for _, count in pulls)
        rows = [[words, f"{count:,}", "█" * round(_BAR * count / most)] for words, count in pulls]
        yield titled_table("staleness", ">steps behind", ">pulls", "", rows=rows)
        yield from (Text(describe_staleness(summary)[0]), Text())
