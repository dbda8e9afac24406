"""A comparison in a terminal: verdict, why, next; the interval drawn; what moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from stepscope.ui.comparison import (
    interval,
    milliseconds,
    open_words,
    percent,
    promise_words,
    whole_steps,
    words_of,
)
from stepscope.ui.terminal.console import make_console, text_line
from stepscope.ui.terminal.tables import fitting_table, titled_table
from stepscope.ui.words import PARTS, one_line, short_kernel, size

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from stepscope.records.comparison import Comparison, MovedName
    from stepscope.ui.terminal.tables import Row

_STYLES = {"faster": "bold green", "slower": "bold red", "no difference seen": "bold"}
_MARGIN = 0.15  # of the picture, left and right of what is drawn
_WIDEST = 72
_WORTH_A_ROW = 0.001  # of the step


def print_comparison(
    comparison: Comparison,
    *,
    top: int = 6,
    width: int | None = None,
    report: Path | None = None,
) -> None:
    """Everything, to stdout."""
    console = make_console(width)
    for section in _sections(comparison, top, console.width):
        console.print(section)
    if report:
        console.print(Text.assemble("report  ", (one_line(str(report)), "bold")), soft_wrap=True)


def draw_interval(low: float, value: float, high: float, width: int) -> tuple[str, str]:
    """A line with the interval, the change and zero; under it what the marks stand for."""
    ends = (min(low, 0.0), max(high, 0.0))
    margin = _MARGIN * ((ends[1] - ends[0]) or 1.0)
    left, right = ends[0] - margin, ends[1] + margin

    def place(share: float) -> int:
        return round((share - left) / (right - left) * (width - 1))

    line = ["·"] * width
    for cell in range(place(low), place(high) + 1):
        line[cell] = "─"
    line[place(0.0)] = "│"
    line[place(low)], line[place(high)], line[place(value)] = "├", "┤", "●"
    labels = [" "] * width
    for share in (value, low, high, 0.0):
        _label(labels, place(share), "0" if share == 0 else percent(share, sign=True))
    return "".join(line), "".join(labels).rstrip()


def _label(cells: list[str], place: int, text: str) -> None:
    """Centred under its mark where nothing is in the way; else left out."""
    start = min(max(0, place - len(text) // 2), len(cells) - len(text))
    around = cells[max(0, start - 1) : start + len(text) + 1]
    if all(cell == " " for cell in around):
        cells[start : start + len(text)] = text


def _sections(comparison: Comparison, top: int, width: int) -> list[RenderableType]:
    out: list[RenderableType] = [_words(comparison), Text()]
    picture = draw_interval(comparison.low, comparison.change, comparison.high, min(width, _WIDEST))
    out += [*map(Text, picture), Text()]
    if comparison.phases:
        out += [_phases(comparison, width), Text()]
    if comparison.budget:
        out += [_budget_title(comparison), _budget(comparison), Text()]
    for table in (
        _runs(comparison, width),
        _names("kernels", comparison.kernels, comparison.a_ms, top, width),
        _names("operators", comparison.operators, comparison.a_ms, top, width),
        _config(comparison, width),
    ):
        if table is not None and table.row_count:
            out += [table, Text()]
    out += [text_line(f"note  {note}", style="bright_black") for note in comparison.notes]
    return out


def _words(comparison: Comparison) -> Table:
    words = words_of(comparison)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bright_black", no_wrap=True)
    grid.add_column()
    grid.add_row("verdict", text_line(words.verdict, style=_STYLES[comparison.verdict]))
    grid.add_row("why", words.why)
    grid.add_row("next", words.next)
    if comparison.slow_steps is not None:
        slow = comparison.slow_steps
        grid.add_row(
            "slow steps",
            f"95th percentile {milliseconds(slow.a_ms)} -> {milliseconds(slow.b_ms)} ms, "
            f"{percent(slow.change, sign=True)} ({interval(slow.low, slow.high)})",
        )
    if comparison.a_peak_bytes is not None and comparison.b_peak_bytes is not None:
        change = comparison.b_peak_bytes / comparison.a_peak_bytes - 1
        grid.add_row(
            "memory",
            f"peak {size(comparison.a_peak_bytes)} -> {size(comparison.b_peak_bytes)}, "
            f"{percent(change, sign=True)}",
        )
    if comparison.promise is not None:
        style = "green" if comparison.promise.inside else "yellow"
        grid.add_row("promise", text_line(promise_words(comparison.promise), style=style))
    for waiting in comparison.open_promises:
        grid.add_row("promise", text_line(open_words(waiting), style="yellow"))
    return grid


def _runs(comparison: Comparison, width: int) -> Table | None:
    """Only where they say more than the verdict does."""
    runs = [*comparison.a.runs, *comparison.b.runs]
    if len(runs) == 2 and not any(run.warm_up or run.drift for run in runs):
        return None
    table = titled_table(
        "runs",
        ("", "l"),
        ("median", "r"),
        ("steps", "r"),
        ("effective", "r"),
        ("warm-up", "r"),
        ("drift", "r"),
        ("path", "l"),
    )
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        for run in side.runs:
            rank = f" rank {run.rank}" if run.rank is not None else ""
            table.add_row(
                name,
                f"{milliseconds(run.median_ms)} ms",
                str(run.steps),
                f"{run.effective_steps:.0f}",
                str(run.warm_up) if run.warm_up else "",
                percent(run.drift, sign=True) if run.drift else "",
                short_kernel(f"{run.path}{rank}", max(16, width - 46)),
            )
    return table


def _budget_title(comparison: Comparison) -> Text:
    """A line of its own: a table's title is no wider than the table."""
    a, b = (milliseconds(ms) for ms in whole_steps(comparison))
    profiled = "profiled " if comparison.steps_are == "profiled" else ""
    return Text.assemble(
        (f"parts of the {profiled}step", "bold"),
        (f"  {a} -> {b} ms, divided by a few profiled steps: no interval", "bright_black"),
    )


def _budget(comparison: Comparison) -> Table:
    table = titled_table("", ("part", "l"), ("A", "r"), ("B", "r"), ("change", "r"))
    table.title = None
    for row in sorted(comparison.budget, key=lambda row: -abs(row.change_ms)):
        if max(row.a_ms, row.b_ms) >= _WORTH_A_ROW * comparison.a_ms:
            table.add_row(
                PARTS[row.id][0].lower(),
                f"{row.a_ms:.2f} ms",
                f"{row.b_ms:.2f} ms",
                f"{row.change_ms:+.2f} ms",
            )
    return table


def _phases(comparison: Comparison, width: int) -> Table:
    columns = [("phase", "l"), ("A", "r"), ("B", "r"), ("change", "r")]
    columns += [(f"{comparison.confidence:.0%} interval", "r"), ("", "l")]
    rows: list[Row] = []
    for row in (*comparison.phases, *((comparison.rest,) if comparison.rest else ())):
        moved = not row.low_ms <= 0 <= row.high_ms
        numbers = [f"{row.a_ms:.2f}", f"{row.b_ms:.2f}", f"{row.change_ms:+.2f}"]
        between = f"{row.low_ms:+.2f} to {row.high_ms:+.2f}"
        rows.append(([row.id, *numbers, between, "moved" if moved else ""], None))
    title = "phases of the loop, medians of all steps, ms"
    return fitting_table(title, columns, rows, width=width, spare=("B", "A"))


def _names(title: str, rows: tuple[MovedName, ...], step_ms: float, top: int, width: int) -> Table:
    table = titled_table(
        f"{title}, ms a step",
        ("change", "r"),
        ("A", "r"),
        ("B", "r"),
        ("calls", "r"),
        ("name", "l"),
    )
    for row in [row for row in rows if abs(row.change_ms) >= _WORTH_A_ROW * step_ms][:top]:
        table.add_row(
            f"{row.change_ms:+.3f}",
            "came" if row.a_ms is None else f"{row.a_ms:.3f}",
            "went" if row.b_ms is None else f"{row.b_ms:.3f}",
            _calls(row),
            short_kernel(row.name, max(16, width - 44)),
        )
    return table


def _calls(row: MovedName) -> str:
    a, b = (f"{calls:.4g}" if calls else "0" for calls in (row.a_calls, row.b_calls))
    return a if a == b else f"{a} -> {b}"


def _config(comparison: Comparison, width: int) -> Table:
    table = titled_table("what else differs", ("", "l"), ("A", "l"), ("B", "l"))
    room = max(16, (width - 24) // 2)
    for row in comparison.config:
        a, b = row.a or "-", row.b or "-"
        if max(len(a), len(b)) > room:
            a, b = _without_common(a, b)
        table.add_row(row.name.replace("_", " "), _middle(a, room), _middle(b, room))
    return table


def _without_common(a: str, b: str) -> tuple[str, str]:
    """Only the words that differ, where both are too long: what is alike at the ends goes."""
    ours, theirs = a.split(), b.split()
    shorter = min(len(ours), len(theirs))
    front = 0
    while front < shorter and ours[front] == theirs[front]:
        front += 1
    back = 0
    while back < shorter - front and ours[-1 - back] == theirs[-1 - back]:
        back += 1
    first, second = (
        " ".join(["…"] * bool(front) + side[front : len(side) - back] + ["…"] * bool(back))
        for side in (ours, theirs)
    )
    return first, second


def _middle(text: str, room: int) -> str:
    """Both ends: what differs in a word is mostly at its end."""
    if len(text) <= room:
        return text
    front = room // 3
    return f"{text[:front]}…{text[len(text) - (room - front - 1) :]}"
