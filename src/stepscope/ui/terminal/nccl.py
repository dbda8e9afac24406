"""NCCL's logs in a terminal: communicators, connections between ranks, algorithms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from stepscope.records.figures import size
from stepscope.records.words import counted
from stepscope.ui.terminal.console import note_line, text_line
from stepscope.ui.terminal.tables import titled_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from stepscope.records.explanation import NcclSummary
    from stepscope.records.nccl import Choice, CommunicatorRow, TransportRow

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
            _short(row.id, 12 if width < _NARROW else 20),
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


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _count_rest(table: Table, rows: int) -> None:
    if rows > 0:
        table.add_row("…", *[""] * (len(table.columns) - 2), f"{rows} more")
