"""Print what is known of several ranks: who holds the others back, clocks, strategies,
NCCL's logs, and a parameter server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.explain.job.hosts import columns_by_host
from stepscope.explain.parameter_server import describe_staleness
from stepscope.records.explanation import NcclSummary
from stepscope.records.job import HierarchicalAllReduce, Job, JobCollective
from stepscope.records.parameter_server import TogetherSummary, WorkerShare
from stepscope.records.strategies import Strategy
from stepscope.text.figures import byte_rate, duration, milliseconds, significant, size
from stepscope.text.words import counted, short_ranges
from stepscope.ui.terminal.console import cut, labelled_grid, note_line, text_line, titled_table
from stepscope.ui.topics.distributed import (
    Section,
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
from stepscope.ui.topics.whatif import histogram_rows, shard_cells, together_line
from stepscope.ui.words import one_line, or_dash, short_kernel

if TYPE_CHECKING:
    from stepscope.records.nccl import Choice, CommunicatorRow, TransportRow

# Several ranks in a terminal: who holds the others back, how well clocks agree, where they wait.
#
# The table of ranks has each rank's numbers; these are the numbers of the whole job.

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
            short_ranges([job.ranks[i] for i in host.columns]),
            milliseconds(typical),
            milliseconds(median(comm[i] for i in host.columns)),
            f"slowest: rank {job.ranks[slowest]}, {milliseconds(own[slowest])}"
            + (f"  {where}" if (where := place_words(job.places.get(host.host))) else ""),
        )
    if len(rows) > MOST_HOSTS:
        _set_caption(table, f"… {len(rows) - MOST_HOSTS} more, faster")
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
        _set_caption(table, f"… {len(job.collectives) - top} more: see --json or --html")
    return table


def _set_caption(table: Table, words: str) -> None:
    table.caption, table.caption_justify, table.caption_style = words, "left", "bright_black"


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


# How the job is spread over its ranks: a heading and a table per strategy.

_LEFT = ("what", "block", "module", "why", "group", "from", "")


def strategy_sections(
    strategies: Sequence[Strategy],
    hierarchical: Sequence[HierarchicalAllReduce] = (),
    *,
    top: int = 8,
    width: int = 100,
) -> list[RenderableType]:
    out: list[RenderableType] = []
    sections = [*describe_strategies(strategies, top), *describe_hierarchical(hierarchical, top)]
    for section in sections:
        out.append(Text.assemble((section.title, "bold"), "  ", section.heading))
        if section.columns:
            out.append(_table(section, width))
        if section.note:
            out.append(Text(section.note, style="bright_black"))
        out.append(Text())
    return out


def _table(section: Section, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for name in section.columns:
        justify = "left" if name in _LEFT else "right"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for row in section.rows:
        *cells, last = row
        table.add_row(*cells, short_kernel(last, max(16, width - 60)))
    return table


# NCCL's logs in a terminal: communicators, connections between ranks, algorithms.

_NARROW = 80


def nccl_sections(summary: NcclSummary, *, top: int = 8, width: int = 100) -> list[RenderableType]:
    """Tables for the end of a job's explanation; the explanation shows the findings."""
    sections: list[RenderableType] = [_headline(summary), Text()]
    sections += [_communicators(summary.communicators, top, width), Text()]
    if summary.transports:
        sections += [_transports(summary, top), Text()]
    if summary.choices:
        sections += [_choices(summary.choices, top), Text()]
    if summary.settings:
        sections += [_settings(summary), Text()]
    return [*sections, *map(note_line, summary.notes)]


def _headline(summary: NcclSummary) -> Text:
    hosts = len({process.host for process in summary.processes})
    facts = [
        ", ".join(summary.versions) or "NCCL",
        counted(len(summary.processes), "process", "processes"),
        counted(hosts, "host"),
        counted(summary.calls, "call"),
    ]
    return text_line(" · ".join(facts), style="bright_black")


def _communicators(rows: tuple[CommunicatorRow, ...], top: int, width: int) -> Table:
    columns = ["id", ">ranks", ">hosts", ">channels", ">calls"]
    table = titled_table("communicators", *columns, "transports")
    for row in rows[:top]:
        seen = "" if row.ranks_seen == row.nranks else f"{row.ranks_seen} of "
        table.add_row(
            cut(row.id, 12 if width < _NARROW else 20),
            f"{seen}{'?' if row.nranks is None else row.nranks}",
            str(row.nodes or len(row.hosts)),
            " or ".join(map(str, row.channels)) or "-",
            str(row.calls),
            ", ".join(row.transports) or ("-" if row.complete else "never initialised"),
        )
    _count_rest(table, len(rows) - top)
    return table


def _transports(summary: NcclSummary, top: int) -> Table:
    table = titled_table("connections between ranks", ">pairs", ">channels", "where", "transport")
    merged: dict[tuple[str, str], tuple[int, int]] = {}
    for row in summary.transports:
        key = row.transport, _where(row)
        pairs, channels = merged.get(key, (0, 0))
        merged[key] = pairs + row.pairs, max(channels, row.channels)
    rows = sorted(merged.items(), key=lambda item: -item[1][0])
    for (transport, where), (pairs, channels) in rows[:top]:
        table.add_row(str(pairs), str(channels), where, transport)
    _count_rest(table, len(rows) - top)
    return table


def _where(row: TransportRow) -> str:
    if row.within_host is None:
        return "-"
    return "within a host" if row.within_host else "between hosts"


def _choices(choices: tuple[Choice, ...], top: int) -> Table:
    columns = (">calls", ">size", ">channels", "kind", "algorithm")
    table = titled_table("algorithms (rank 0)", *columns)
    for choice in choices[:top]:
        first, last = choice.first_channel, choice.last_channel
        table.add_row(
            str(choice.count),
            size(choice.size_bytes),
            "-" if first is None or last is None else str(last - first + 1),
            choice.kind or "-",
            f"{choice.algorithm} {choice.protocol}",
        )
    _count_rest(table, len(choices) - top)
    return table


def _settings(summary: NcclSummary) -> Table:
    table = titled_table("environment", "name", "value")
    for name, values in summary.settings.items():
        shown = ", ".join(values[:4]) + (f" and {len(values) - 4} more" if len(values) > 4 else "")
        table.add_row(name, shown)
    return table


def _count_rest(table: Table, rows: int) -> None:
    if rows > 0:
        table.add_row("…", *[""] * (len(table.columns) - 2), f"{rows} more")


# Training through a parameter server, in a terminal.

_BAR = 40  # characters of the longest bar
_MOST_WORKERS = 16


def together_sections(summary: TogetherSummary, top: int) -> list[RenderableType]:
    workers, shards = len(summary.workers), len(summary.shards)
    title = f"parameter server: {counted(workers, 'worker')}, {counted(shards, 'shard')}"
    out: list[RenderableType] = [text_line(title, style="bold"), Text(together_line(summary))]
    out += [Text(summary.why), Text(), _workers(summary), Text()]
    if summary.blocks:
        out += [_blocks(summary, top), Text()]
    out += [_shards(summary), Text()]
    if summary.staleness.pulls:
        out += [_staleness(summary), Text(describe_staleness(summary)[0]), Text()]
    return out


def _workers(summary: TogetherSummary) -> Table:
    columns = (">worker", ">steps", ">step", ">own work", ">blocked", ">pull", ">push", ">other")
    table = titled_table("workers, mean step", *columns, ">sent", ">received", ">behind")
    for worker in summary.workers[:_MOST_WORKERS]:
        table.add_row(*_worker_row(worker))
    if len(summary.workers) > _MOST_WORKERS:
        table.add_row("…", f"{len(summary.workers) - _MOST_WORKERS} more")
    return table


def _worker_row(worker: WorkerShare) -> tuple[str, ...]:
    def mean(ns: int) -> str:
        return milliseconds(ns / 1e6 / worker.steps)

    return (
        str(worker.worker),
        f"{worker.steps:,}",
        mean(worker.whole_ns),
        mean(worker.compute_ns),
        mean(worker.blocked_ns),
        mean(worker.pull_ns),
        mean(worker.push_ns),
        mean(worker.other_ns),
        size(worker.pushed_bytes),
        size(worker.pulled_bytes),
        "-" if worker.mean_gap is None else significant(worker.mean_gap),
    )


def _blocks(summary: TogetherSummary, top: int) -> Table:
    table = titled_table("who waits for whom", ">worker", ">waits for", ">in all", ">times")
    for pair in summary.blocks[:top]:
        waited = milliseconds(pair.blocked_ns / 1e6)
        table.add_row(str(pair.worker), str(pair.by), waited, f"{pair.times:,}")
    return table


def _shards(summary: TogetherSummary) -> Table:
    columns = (
        ">shard",
        ">parameters",
        ">updates",
        ">pulls",
        ">busy",
        ">queue",
        ">longest",
        ">wait",
    )
    table = titled_table("server load", *columns)
    for shard in summary.shards:
        table.add_row(*shard_cells(shard))
    return table


def _staleness(summary: TogetherSummary) -> Table:
    table = titled_table("staleness", ">steps behind", ">pulls", "")
    rows = histogram_rows(summary.staleness)
    most = max(count for _, count in rows)
    for words, count in rows:
        table.add_row(words, f"{count:,}", "█" * round(_BAR * count / most))
    return table
