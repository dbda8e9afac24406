"""`stepscope top`: a run that goes on, as one screen of lines. Drawing only: no clock, no files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from stepscope.records.figures import long_duration, milliseconds, percent, significant
from stepscope.records.step_columns import ALL_PHASES
from stepscope.records.words import counted
from stepscope.ui.live_words import (
    VISIBLE,
    account_so_far,
    attempt_words,
    latest_changes,
    matters,
    memory_items,
    progress_items,
    spread_words,
)
from stepscope.ui.run_words import (
    how_often,
    phase_words,
    rank_name,
    stall_words,
    times_items,
)
from stepscope.ui.terminal.bars import COLOURS, draw_bar
from stepscope.ui.terminal.console import text_line
from stepscope.ui.terminal.lines import FAINT, LABELS, cut, flow, labelled
from stepscope.ui.terminal.sparkline import LETTERS, draw_steps, mark_stalls
from stepscope.ui.words import or_dash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.live_run import LiveRank, LiveRun
    from stepscope.records.whole_run import Stall

KEYS = "q quits · p pauses"
PAUSED = "paused: p goes on · q quits"
_STYLES = {
    "starting up": "cyan",
    "training": "green",
    "shutting down": "cyan",
    "finished": "green",
    "seems to hang": "bold red",
    "failed": "bold red",
    "killed": "bold red",
    "unknown": "yellow",
}
_PHASE_COLOURS = (
    *("bright_red", "green", "blue", "yellow", "cyan"),
    *(COLOURS[f"stall_{cause}"] for cause in ("evaluation", "checkpoint", "gc", "compile")),
    "white",
)
# (character, colour) of each phase
_PHASES = dict(zip(ALL_PHASES, zip("╳█▓▒░▦▧▨▩─", _PHASE_COLOURS, strict=True), strict=True))
_RECENT = 200  # steps
_MOST_STALLS = 5
_FEWEST_RANKS = 3  # rows


def live_lines(
    run: LiveRun, width: int, height: int | None = None, *, keys: str = ""
) -> list[Text]:
    """At most `height` lines; `keys` says which keys work."""
    ending = [Text(cut(keys, width), FAINT)] if keys else []
    room = None if height is None else max(1, height - len(ending))
    lines = _all_lines(run, width, room, brief=False)
    if room is not None and len(lines) > room:
        lines = _all_lines(run, width, room, brief=True)[:room]
    return lines + ending


def _all_lines(run: LiveRun, width: int, room: int | None, *, brief: bool) -> list[Text]:
    """`brief` leaves out what a small screen can do without."""
    lines = [*_head(run, width, brief=brief), *_body(run, width, brief=brief)]
    after = [line for note in run.notes for line in labelled("note", [_row(note, width, FAINT)])]
    for attempt in attempt_words(run.earlier):
        after += labelled("attempt", [_row(attempt, width, FAINT)])
    left = None if room is None else room - len(lines) - len(after)
    return [*lines, *_rank_rows(run, width, left, brief=brief), *after]


def _row(words: str, width: int, style: str = "") -> Text:
    return text_line(cut(words, width - LABELS), style)


def _head(run: LiveRun, width: int, *, brief: bool) -> list[Text]:
    name = Path(run.folder).absolute().name
    ranks = counted(len(run.ranks), "rank") if len(run.ranks) > 1 else ""
    attempt = max((rank.run.attempt for rank in run.ranks), default=1)
    again = f"attempt {attempt}" if attempt > 1 else ""
    whole = f"{long_duration(1e9 * run.seconds)}" if run.seconds else ""
    title = " · ".join(filter(None, (name, ranks, again, whole)))
    status = Text.assemble((run.status, _STYLES[run.status]), f": {run.detail}")
    status.truncate(width - LABELS, overflow="ellipsis")
    lines = [text_line(cut(title, width), "bold"), *labelled("status", [status])]
    if run.command and not brief:
        lines += labelled("command", [_row(" ".join(run.command), width, FAINT)])
    return lines


def _body(run: LiveRun, width: int, *, brief: bool) -> list[Text]:
    """The slowest rank in detail."""
    rank = next((rank for rank in run.by_mean if rank.last_step is not None), None)
    if rank is None:
        return []
    return [
        *labelled("steps", _flow_words(progress_items(run, rank), width)),
        *labelled("step", _step(run, rank, width)),
        *_over_time(rank, width, brief=brief),
        *labelled("stalls", _stalls(rank, width, 2 if brief else _MOST_STALLS)),
        *labelled("changes", [_row(words, width) for words in latest_changes(rank)]),
        *labelled("run" if run.has_ended else "so far", _flow_words(account_so_far(rank), width)),
        *([] if brief else labelled("memory", _flow_words(memory_items(rank), width))),
    ]


def _flow_words(items: Sequence[str], width: int) -> list[Text]:
    rows: list[str] = []
    for item in items:
        longer = f"{rows[-1]} · {item}" if rows else ""
        if longer and cell_len(longer) <= width - LABELS:
            rows[-1] = longer
        else:
            rows.append(item)
    return [_row(row, width) for row in rows]


def _step(run: LiveRun, rank: LiveRank, width: int) -> list[Text]:
    """The mean step, and the typical one by phase."""
    if rank.run.times is None:
        return [_row("no steady step yet", width, FAINT)]
    whose = [f"rank {rank.run.rank}"] if len(run.ranks) > 1 else []
    rows = _flow_words([*times_items(rank.run.times), *whose], width)
    whole = sum(rank.phases_ms.values())
    if not whole:
        return rows
    parts = [(phase, ms / whole) for phase in ALL_PHASES if (ms := rank.phases_ms.get(phase))]
    rows.append(draw_bar([(share, *_PHASES[phase]) for phase, share in parts], width - LABELS))
    items = [
        Text.assemble(
            (f"{_PHASES[phase][0]} ", _PHASES[phase][1]),
            f"{phase_words(phase)} {milliseconds(rank.phases_ms[phase])} {percent(share)}",
        )
        for phase, share in parts
        if share >= VISIBLE
    ]
    return rows + flow(items, width - LABELS)


def _over_time(rank: LiveRank, width: int, *, brief: bool) -> list[Text]:
    series = rank.run.series
    room = width - LABELS
    if series is None or not len(draw_steps(series, room)):
        return []
    marks = mark_stalls(series, room)
    lines = labelled("over time", [draw_steps(series, room), *([marks] if marks else [])])
    if len(series.number) > _RECENT and not brief:
        title = f"last {_RECENT}"
        lines += labelled(title, [draw_steps(series, room, _RECENT)])
    return lines


def _stalls(rank: LiveRank, width: int, most: int) -> list[Text]:
    if rank.run.times is None:
        return []
    stalls = [stall for stall in rank.run.stalls if matters(stall)]
    if not stalls:
        varies = percent(rank.run.times.variation)
        return [_row(f"none so far; steps vary by {varies}", width, FAINT)]
    rows = [_stall(stall, width) for stall in stalls[:most]]
    if len(stalls) > most:
        rows.append(_row(f"{counted(len(stalls) - most, 'more cause')}", width, FAINT))
    return rows


def _stall(stall: Stall, width: int) -> Text:
    cost = f"{milliseconds(stall.cost_ms + stall.between_epochs_ms):>9} a step"
    share = percent(stall.share) if stall.steps else ""  # time between epochs is no part of a step
    row = Text.assemble(
        (f"{LETTERS[stall.cause]} ", COLOURS[f"stall_{stall.cause}"]),
        f"{stall_words(stall):<13} {cost} {share:>5}  ",
    )
    often = how_often(stall)
    if row.cell_len + len(often) > width - LABELS:
        often = often.rpartition(", ")[2]
    return row.append(often, FAINT)


# Several ranks.


def _rank_rows(run: LiveRun, width: int, room: int | None, *, brief: bool) -> list[Text]:
    """The slowest first, as many as fit; then how far they lie apart."""
    if len(run.ranks) < 2:
        return []
    spread = spread_words(run)
    ending = labelled("spread", [_row(spread, width)]) if spread else []
    gap = [] if brief else [Text()]
    most = None if room is None else room - len(ending) - len(gap) - 1
    if most is not None and most < len(run.ranks):
        most = max(_FEWEST_RANKS, most - 1)  # a line says how many more there are
    shown = run.by_mean[:most]
    header = (
        f"{'rank':>5} {'steps':>9} {'now/s':>6} {'mean':>9} {'p99':>9} {'stalls':>6}  over time"
    )
    lines = [*gap, Text(cut(header, width), FAINT), *(_rank_row(rank, width) for rank in shown)]
    if len(shown) < len(run.ranks):
        lines.append(Text(f"{len(run.ranks) - len(shown):>5,} more, faster", FAINT))
    return lines + ending


def _rank_row(rank: LiveRank, width: int) -> Text:
    times, series = rank.run.times, rank.run.series
    stalled = sum(stall.share for stall in rank.run.stalls)
    row = Text(
        f"{rank_name(rank.run):>5} {rank.run.steps:>9,} "
        f"{or_dash(rank.recent_steps_per_s, significant):>6} "
        f"{milliseconds(times.mean_ms) if times else '-':>9} "
        f"{milliseconds(times.p99_ms) if times else '-':>9} "
        f"{percent(stalled) if times else '-':>6}  "
    )
    if series is not None:
        row.append_text(draw_steps(series, max(1, width - row.cell_len)))
    return row
