"""The whole run in `explain`'s terminal: one line on the short screen, tables with `--full`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.records.run import AccountPart, RankRun, RunAccount, Stall, WholeRun
from stepscope.text.figures import factor, long_duration, milliseconds, percent
from stepscope.text.words import counted
from stepscope.ui.terminal.console import (
    FAINT,
    cut,
    draw_steps,
    fitting_table,
    note_line,
    titled_table,
)
from stepscope.ui.words import (
    account_items,
    account_words,
    one_line,
    phase_words,
    rank_name,
    stall_time_words,
    stall_words,
    times_items,
)

_SPARKS, _FEWEST_SPARKS = 24, 12  # columns
_COLUMN = 11  # of the account
_MOST_RANKS = 8
_VISIBLE = 0.0005  # of the wall time


def run_line(run: WholeRun, room: int) -> Text | None:
    """1,081 steps in 71.2 s: steady training 84%, start-up 9.1% · ▃▃▃█▃▃; None without steps."""
    ranks = [rank for rank in run.ranks if rank.steps]
    if not ranks:
        return None
    slowest = max(ranks, key=lambda rank: rank.times.mean_ms if rank.times else 0.0)
    counts = [rank.steps for rank in run.ranks]
    words = counted(max(counts), "step")
    if min(counts) < max(counts):
        words = f"{min(counts):,} to {words}"
    items: list[str] = []
    if run.account is not None:
        words += f" in {long_duration(1e6 * run.account.wall_ms)}"
        items = account_items(run.account)
    elif slowest.times is not None:
        items = times_items(slowest.times)[:3]

    def fitting(room: int) -> str:
        """As many of the first items as fit after the words."""
        line = words
        for number in range(1, len(items) + 1):
            longer = f"{words}: {', '.join(items[:number])}"
            if cell_len(longer) > room:
                break
            line = longer
        return line

    short = fitting(room - _FEWEST_SPARKS - 3)
    line = Text(cut(short if short != words else fitting(room), room))
    sparks = min(_SPARKS, room - line.cell_len - 3)
    if slowest.series is not None and sparks >= _FEWEST_SPARKS:
        line.append(" · ").append_text(draw_steps(slowest.series, sparks))
    return line


def run_sections(run: WholeRun, width: int) -> Iterator[RenderableType]:
    """Account, stalls and changes of level; what a run does not have is left out."""
    if run.account is not None and run.account.wall_ms:
        yield _account_table(run, run.account, width)
        yield from (*map(note_line, run.account.notes), Text())
    times = [
        (
            rank_name(rank),
            f"{times.steps:,}",
            milliseconds(times.mean_ms),
            milliseconds(times.typical_ms),
            milliseconds(times.median_ms),
            milliseconds(times.p99_ms),
            milliseconds(times.longest_ms),
            percent(times.variation),
        )
        for rank in run.ranks
        if (times := rank.times) is not None
    ]
    stalls = [(rank, stall) for rank in run.ranks for stall in rank.stalls]
    stalls.sort(key=lambda pair: -pair[1].cost_ms - pair[1].between_epochs_ms)
    changes = [
        (
            rank_name(rank),
            f"{change.step:,}",
            f"{change.low:,} to {change.high:,}",
            milliseconds(change.before_ms),
            milliseconds(change.after_ms),
            factor(change.factor),
        )
        for rank in run.ranks
        for change in rank.changes
    ]
    for title, columns, rows, spare in (
        (
            "steps of the whole run",
            (">rank", ">steady", ">mean", ">typical", ">median", ">p99", ">longest", ">varies"),
            times,
            ("varies", "median", "steady", "longest"),
        ),
        (
            "stalls: steps that take longer than a typical one",
            ("cause", ">rank", ">cost a step", ">share", ">steps", ">every", ">one takes", "where"),
            [_stall_row(rank, stall) for rank, stall in stalls],
            ("one takes", "where", "rank"),
        ),
        (
            "changes of the typical step",
            (">rank", ">from step", ">between", ">before", ">after", ">times"),
            changes,
            ("times", "between"),
        ),
    ):
        if rows:
            shown = rows[: 2 * _MOST_RANKS]
            yield from (fitting_table(title, columns, shown, width=width, spare=spare), Text())


def _account_table(run: WholeRun, account: RunAccount, width: int) -> Table:
    """Parts in rows; the mean and as many ranks as fit in columns."""
    ranks = [(rank_name(rank), rank.account) for rank in run.ranks if rank.account is not None]
    room = min(_MOST_RANKS, max(0, (width - 40) // _COLUMN)) if len(ranks) > 1 else 0
    wall = long_duration(1e6 * account.wall_ms)
    table = titled_table(
        f"wall time {wall}, goodput {percent(account.goodput)}",
        *("", ">time", ">share", *(f">rank {name}" for name, _ in ranks[:room])),
    )

    def add_row(words: str, part: AccountPart, path: tuple[str, ...], style: str = "") -> None:
        shares = [percent(_share(account.parts, path)) for _, account in ranks[:room]]
        took = long_duration(1e6 * part.ms)
        table.add_row(words, took, percent(part.share), *shares, style=style)

    for part in account.parts:
        if part.share >= _VISIBLE:
            add_row(account_words(part), part, (part.id,))
            for inner in part.parts:
                if inner.share >= _VISIBLE and len(part.parts) > 1:
                    add_row(f"  {phase_words(inner.id)}", inner, (part.id, inner.id), FAINT)
    return table


def _share(parts: tuple[AccountPart, ...], path: tuple[str, ...]) -> float:
    for part in parts:
        if part.id == path[0]:
            return _share(part.parts, path[1:]) if len(path) > 1 else part.share
    return 0.0


def _stall_row(rank: RankRun, stall: Stall) -> tuple[str, ...]:
    return (
        stall_words(stall),
        rank_name(rank),
        milliseconds(stall.cost_ms + stall.between_epochs_ms),
        percent(stall.share) if stall.steps else "",  # else all of it lies between epochs
        f"{stall.steps:,}" if stall.steps else "",
        f"{stall.period:,}" if stall.period else "",
        stall_time_words(stall),
        one_line(stall.where[0].short) if stall.where else "",
    )
