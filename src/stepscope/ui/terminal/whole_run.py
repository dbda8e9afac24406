"""The whole run in `explain`'s terminal: one line on the short screen, tables with `--full`."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.records.run import AccountPart, RankRun, Stall, WholeRun
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
    slowest = _slowest(run)
    if slowest is None:
        return None
    counts = [rank.steps for rank in run.ranks]
    steps = counted(max(counts), "step")
    words = steps if min(counts) == max(counts) else f"{min(counts):,} to {steps}"
    if run.account is not None:
        words += f" in {long_duration(1e6 * run.account.wall_ms)}"
    items = account_items(run.account) if run.account else []
    if run.account is None and slowest.times is not None:
        items = times_items(slowest.times)[:3]
    kept = _fitting(words, items, room - _FEWEST_SPARKS - 3) or _fitting(words, items, room)
    line = Text(cut(f"{words}: {', '.join(kept)}" if kept else words, room))
    sparks = min(_SPARKS, room - line.cell_len - 3)
    if slowest.series is not None and sparks >= _FEWEST_SPARKS:
        line.append(" · ").append_text(draw_steps(slowest.series, sparks))
    return line


def _fitting(words: str, items: list[str], room: int) -> list[str]:
    """The first items, as many as fit after the words."""
    kept: list[str] = []
    for item in items:
        if cell_len(f"{words}: {', '.join([*kept, item])}") > room:
            break
        kept.append(item)
    return kept


def _slowest(run: WholeRun) -> RankRun | None:
    steps = [rank for rank in run.ranks if rank.steps]
    return max(steps, key=lambda rank: rank.times.mean_ms if rank.times else 0.0, default=None)


def run_sections(run: WholeRun, width: int) -> list[RenderableType]:
    """Account, stalls and changes of level; what a run does not have is left out."""
    out: list[RenderableType] = []
    if (accounts := _account_table(run, width)) is not None:
        notes = run.account.notes if run.account else ()
        out += [accounts, *map(note_line, notes), Text()]
    if (times := _times_table(run, width)) is not None:
        out += [times, Text()]
    if any(rank.stalls for rank in run.ranks):
        out += [_stall_table(run, width), Text()]
    if any(rank.changes for rank in run.ranks):
        out += [_change_table(run, width), Text()]
    return out


def _account_table(run: WholeRun, width: int) -> Table | None:
    """Parts in rows; the mean and as many ranks as fit in columns."""
    ranks = [rank for rank in run.ranks if rank.account is not None]
    if run.account is None or not run.account.wall_ms:
        return None
    shown = ranks[: min(_MOST_RANKS, max(0, (width - 40) // _COLUMN))] if len(ranks) > 1 else []
    wall = long_duration(1e6 * run.account.wall_ms)
    title = f"wall time {wall}, goodput {percent(run.account.goodput)}"
    table = titled_table(
        title, "", ">time", ">share", *(f">rank {rank_name(rank)}" for rank in shown)
    )
    for part in run.account.parts:
        if part.share >= _VISIBLE:
            table.add_row(*_account_row(account_words(part), part, shown, (part.id,)))
            for inner in part.parts:
                if inner.share >= _VISIBLE and len(part.parts) > 1:
                    words = f"  {phase_words(inner.id)}"
                    row = _account_row(words, inner, shown, (part.id, inner.id))
                    table.add_row(*row, style=FAINT)
    return table


def _account_row(
    words: str, part: AccountPart, ranks: list[RankRun], path: tuple[str, ...]
) -> list[str]:
    shares = [_share(rank.account.parts if rank.account else (), path) for rank in ranks]
    return [words, long_duration(1e6 * part.ms), percent(part.share), *map(percent, shares)]


def _share(parts: tuple[AccountPart, ...], path: tuple[str, ...]) -> float:
    for part in parts:
        if part.id == path[0]:
            return _share(part.parts, path[1:]) if len(path) > 1 else part.share
    return 0.0


def _times_table(run: WholeRun, width: int) -> Table | None:
    """The mean step of every rank, and what it hides."""
    timed = [rank for rank in run.ranks if rank.times is not None]
    if not timed:
        return None
    rows = [
        [
            rank_name(rank),
            f"{times.steps:,}",
            milliseconds(times.mean_ms),
            milliseconds(times.typical_ms),
            milliseconds(times.median_ms),
            milliseconds(times.p99_ms),
            milliseconds(times.longest_ms),
            percent(times.variation),
        ]
        for rank in timed[: 2 * _MOST_RANKS]
        if (times := rank.times) is not None
    ]
    columns = (">rank", ">steady", ">mean", ">typical", ">median", ">p99", ">longest", ">varies")
    spare = ("varies", "median", "steady", "longest")
    return fitting_table("steps of the whole run", columns, rows, width=width, spare=spare)


def _stall_table(run: WholeRun, width: int) -> Table:
    """The costliest first, over all ranks."""
    listed = [(rank, stall) for rank in run.ranks for stall in rank.stalls]
    listed.sort(key=lambda pair: -pair[1].cost_ms - pair[1].between_epochs_ms)
    rows = [_stall_row(rank, stall) for rank, stall in listed[: 2 * _MOST_RANKS]]
    columns = (
        "cause",
        ">rank",
        ">cost a step",
        ">share",
        ">steps",
        ">every",
        ">one takes",
        "where",
    )
    title = "stalls: steps that take longer than a typical one"
    return fitting_table(title, columns, rows, width=width, spare=("one takes", "where", "rank"))


def _stall_row(rank: RankRun, stall: Stall) -> list[str]:
    place = stall.where[0] if stall.where else None
    return [
        stall_words(stall),
        rank_name(rank),
        milliseconds(stall.cost_ms + stall.between_epochs_ms),
        percent(stall.share) if stall.steps else "",  # else all of it lies between epochs
        f"{stall.steps:,}" if stall.steps else "",
        f"{stall.period:,}" if stall.period else "",
        stall_time_words(stall),
        one_line(place.short) if place else "",
    ]


def _change_table(run: WholeRun, width: int) -> Table:
    rows = [
        [
            rank_name(rank),
            f"{change.step:,}",
            f"{change.low:,} to {change.high:,}",
            milliseconds(change.before_ms),
            milliseconds(change.after_ms),
            factor(change.factor),
        ]
        for rank in run.ranks
        for change in rank.changes
    ]
    columns = (">rank", ">from step", ">between", ">before", ">after", ">times")
    title = "changes of the typical step"
    spare = ("times", "between")
    return fitting_table(title, columns, rows[: 2 * _MOST_RANKS], width=width, spare=spare)
