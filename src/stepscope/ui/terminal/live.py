"""Run the screen of `stepscope top`: look at the folder, draw the run as one screen of
lines, wait for a key.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from stepscope.explain.whole_run.live import explain_live
from stepscope.records.rank import ALL_PHASES
from stepscope.records.run import LiveRank, LiveRun, Stall
from stepscope.text.figures import long_duration, milliseconds, percent, significant
from stepscope.text.words import counted
from stepscope.trace.run_folder.follow_run import RunFollower
from stepscope.ui.terminal.console import (
    COLOURS,
    FAINT,
    LABELS,
    LETTERS,
    cut,
    draw_bar,
    draw_steps,
    flow,
    labelled,
    make_console,
    mark_stalls,
    text_line,
)
from stepscope.ui.words import (
    VISIBLE,
    account_so_far,
    attempt_words,
    how_often,
    latest_changes,
    matters,
    memory_items,
    or_dash,
    phase_words,
    progress_items,
    rank_name,
    spread_words,
    stall_words,
    times_items,
)

_LEAST_REST = 9  # times as long as a look took: at most a tenth of a core
_LONGEST_REST_S = 60.0
_NARROWEST = 60
_NICER = 10
_QUIT, _PAUSE = ("q", "Q", "\x03", "\x04"), ("p", "P", " ")


def look(follower: RunFollower, before: LiveRun | None = None) -> LiveRun:
    """The run as it is now; `before` is the last look."""
    return explain_live(follower.read(), time.time(), before)


def print_once(follower: RunFollower) -> None:
    _print(make_console(), look(follower))


def show_live(follower: RunFollower, interval: float) -> None:
    """Until the run ends or a key quits; the last screen stays on the terminal."""
    console = make_console()
    if not console.is_terminal or console.is_dumb_terminal:
        _print(console, look(follower))
        return
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICER)  # the job comes first
    run = look(follower)
    if not run.has_ended:
        with contextlib.suppress(KeyboardInterrupt), _keyboard() as keys, _screen(console) as live:
            for run, hint in _follow(follower, run, keys, interval):  # noqa: B020
                _draw(live, run, hint)
    _print(console, run)


def _follow(
    follower: RunFollower, run: LiveRun, keys: _Keys, interval: float
) -> Iterator[tuple[LiveRun, str]]:
    """What to show, and which keys work, until the run ends or a key quits."""
    took = 0.0
    while not run.has_ended:
        yield run, KEYS
        key = keys.wait(max(interval, min(_LEAST_REST * took, _LONGEST_REST_S)))
        if key in _PAUSE:
            yield run, PAUSED
            while not (key := keys.wait(interval)):
                yield run, PAUSED  # the terminal may have another size
        if key in _QUIT:
            return
        began = time.monotonic()
        run = look(follower, run)
        took = time.monotonic() - began
    yield run, ""


def _draw(live: Live, run: LiveRun, keys: str) -> None:
    """As large as the terminal is now."""
    terminal = shutil.get_terminal_size()
    live.console.width = max(_NARROWEST, terminal.columns)
    live.console.height = terminal.lines
    lines = live_lines(run, live.console.width, terminal.lines, keys=keys)
    live.update(Text("\n").join(lines), refresh=True)


def _print(console: Console, run: LiveRun) -> None:
    for line in live_lines(run, console.width):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


@contextlib.contextmanager
def _screen(console: Console) -> Iterator[Live]:
    """A screen of its own; SIGTERM ends it as Ctrl-C does."""

    def leave(number: int, frame: Any) -> None:
        del frame
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield live
    finally:
        signal.signal(signal.SIGTERM, before)


class _Keys:
    """Single keys; without a keyboard, only time passes."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def wait(self, seconds: float) -> str:
        """The key that was pressed within this time, or nothing."""
        if self._descriptor is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._descriptor, 64).decode("utf-8", "replace")
        if not pressed:  # the terminal is gone
            return _QUIT[0]
        return next((key for key in pressed if key in (*_PAUSE, *_QUIT)), "")


@contextlib.contextmanager
def _keyboard() -> Iterator[_Keys]:
    """Keys arrive at once and are not shown; the terminal is as before afterwards."""
    import termios
    import tty

    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (AttributeError, OSError, ValueError, termios.error):
        yield _Keys(None)
        return
    tty.setcbreak(descriptor)
    try:
        yield _Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


# `stepscope top`: a run that goes on, as one screen of lines. Drawing only: no clock, no files.

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
        lines += labelled(f"last {_RECENT}", [draw_steps(series, room, _RECENT)])
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
