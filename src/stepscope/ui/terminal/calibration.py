"""A calibration in a terminal: verdict, why, next; the machine; a line for each collective."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stepscope.records.words import counted
from stepscope.ui.calibration import beside_compute, compare_words, rate, rows_of, size, words_of
from stepscope.ui.terminal.tables import titled_table
from stepscope.ui.words import duration, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich.table import Table

    from stepscope.predict.algorithms import AlgorithmComparison
    from stepscope.records.profile import Profile
    from stepscope.ui.calibration import Words

    Shown = Callable[[str, float], None]

_BAR = 24
_WIDE = 88  # columns that the whole table of collectives needs


@contextmanager
def shown_shares(*, quiet: bool = False) -> Iterator[Shown]:
    """Gives a callback (what is measured, share of all that is done); silent when nobody looks."""
    drawn = False
    silent = quiet or not sys.stderr.isatty()

    def show(what: str, share: float) -> None:
        nonlocal drawn
        if silent:
            return
        drawn = True
        bar = ("█" * round(_BAR * share)).ljust(_BAR, "░")
        sys.stderr.write(f"\r\x1b[2Kmeasuring {bar} {share:4.0%} {what}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        if drawn:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


def print_calibration(
    profile: Profile, *, saved: Path, report: Path | None = None, width: int | None = None
) -> None:
    """Everything, to stdout."""
    from rich.text import Text

    from stepscope.ui.terminal.console import make_console, text_line

    console = make_console(width)
    console.print(text_line(_headline(profile), style="bright_black"))
    console.print()
    console.print(_words(words_of(profile)))
    console.print()
    console.print(_machine(profile))
    if profile.fits:
        console.print()
        console.print(_collectives(profile, wide=console.width >= _WIDE))
    if beside := beside_compute(profile):
        console.print()
        console.print(Text(f"overlap  {beside}"))
    for what, why in profile.not_offered.items():
        by = profile.backend if ", " in what else profile.device
        console.print(text_line(f"note  {what}: not offered by {by}: {why}", style="bright_black"))
    console.print()
    console.print(Text.assemble("profile  ", (one_line(str(saved)), "bold")), soft_wrap=True)
    if report:
        console.print(Text.assemble("report   ", (one_line(str(report)), "bold")), soft_wrap=True)


def print_comparison(
    comparison: AlgorithmComparison, profile: Profile, *, width: int | None = None
) -> None:
    """Algorithms side by side."""
    from stepscope.ui.terminal.console import make_console

    console = make_console(width)
    console.print(_words(compare_words(comparison, profile)))
    console.print()
    table = titled_table("all_reduce", ("algorithm", "l"), ("time", "r"), ("against best", "r"))
    least = min(comparison.times_ns.values())
    for name, ns in sorted(comparison.times_ns.items(), key=lambda pair: pair[1]):
        table.add_row(name.replace("_", "-"), duration(ns), f"x{ns / least:.2f}" if least else "-")
    console.print(table)


def _headline(profile: Profile) -> str:
    facts = [profile.host, profile.device, f"torch {profile.torch}"]
    if profile.backend:
        facts.append(f"{counted(profile.world_size, 'rank')}, {profile.backend}")
    elif profile.kind == "cpu":
        facts.append(counted(profile.threads, "thread"))
    return " · ".join(facts)


def _words(words: Words) -> Table:
    from rich.table import Table

    from stepscope.ui.terminal.console import text_line

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bright_black", no_wrap=True)
    grid.add_column()
    grid.add_row("verdict", text_line(words.verdict, style="bold"))
    grid.add_row("why", words.why)
    grid.add_row("next", words.next)
    return grid


def machine_rows(profile: Profile) -> list[tuple[str, str, float]]:
    """Label, value and spread of every ceiling."""
    rows = [
        (f"matmul {dtype}", rate(flops, "FLOP/s"), profile.spread.get(f"matmul {dtype}", 0.0))
        for dtype, flops in sorted(profile.matmul_flops.items(), key=lambda pair: -pair[1])
    ]
    for label, name in (
        ("copy, read + write", "copy_bytes_s"),
        ("host to device, pinned", "host_to_device_bytes_s"),
        ("device to host, pinned", "device_to_host_bytes_s"),
    ):
        value = getattr(profile, name)
        if value is not None:
            rows.append((label, rate(value, "B/s"), profile.spread.get(name, 0.0)))
    for label, name in (
        ("launch, host", "launch_ns"),
        ("launch to launch, device", "launch_gap_ns"),
        ("tiny operator, host", "tiny_op_ns"),
    ):
        value = getattr(profile, name)
        if value is not None:
            rows.append((label, duration(value), profile.spread.get(name, 0.0)))
    return rows


def _machine(profile: Profile) -> Table:
    table = titled_table("machine", ("ceiling", "l"), ("measured", "r"), ("spread", "r"))
    for label, value, spread in machine_rows(profile):
        table.add_row(label, value, f"{spread:.1%}")
    return table


def _collectives(profile: Profile, *, wide: bool) -> Table:
    rows = rows_of(profile)
    several = len({row.group for row in rows}) > 1
    columns = [("kind", "l")]
    columns += [("group", "l"), ("ranks", "r")] if several else []
    columns += [("sizes", "r")] if wide else []
    columns += [("latency", "r"), ("algbw", "r"), ("busbw", "r")]
    columns += [("held out", "r"), ("noise", "r")]
    table = titled_table("collectives, GB/s at the largest size", *columns)
    for row in rows:
        cells = {
            "kind": row.kind,
            "group": row.group,
            "ranks": str(row.group_size),
            "sizes": f"{size(row.from_bytes)} - {size(row.to_bytes)}",
            "latency": duration(row.latency_ns),
            "algbw": f"{row.algbw_gb_s:.2f}",
            "busbw": f"{row.busbw_gb_s:.2f}",
            "held out": f"{row.held_out:.1%}",
            "noise": f"{row.noise:.1%}",
        }
        table.add_row(*(cells[name] for name, _ in columns))
    return table
