"""A calibration in a terminal: verdict, why, next; the machine; a line for each collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from stepscope.records.figures import binary_size, duration, factor, percent, significant
from stepscope.records.words import counted
from stepscope.ui.calibration import (
    algorithms_answer,
    calibration_answer,
    collective_rows,
    contention_sentence,
    machine_rows,
)
from stepscope.ui.terminal.console import make_console, text_line
from stepscope.ui.terminal.tables import answer_grid, titled_table
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from stepscope.predict.algorithms import AlgorithmComparison
    from stepscope.records.profile import Profile

_WIDE = 88  # columns that the whole table of collectives needs


def print_calibration(
    profile: Profile, *, saved: Path, report: Path | None = None, width: int | None = None
) -> None:
    """Everything, to stdout."""
    console = make_console(width)
    console.print(text_line(_headline(profile), style="bright_black"))
    console.print()
    console.print(answer_grid(calibration_answer(profile)))
    console.print()
    console.print(_machine(profile))
    if profile.fits:
        console.print()
        console.print(_collectives(profile, wide=console.width >= _WIDE))
    if contention := contention_sentence(profile):
        console.print()
        console.print(Text(f"overlap  {contention}"))
    for what, why in profile.not_offered.items():
        by = profile.backend if ", " in what else profile.device
        console.print(
            text_line(f"note  {what}: {by} does not offer it: {why}", style="bright_black")
        )
    console.print()
    console.print(Text.assemble("profile  ", (one_line(str(saved)), "bold")), soft_wrap=True)
    if report:
        console.print(Text.assemble("report   ", (one_line(str(report)), "bold")), soft_wrap=True)


def print_comparison(
    comparison: AlgorithmComparison, profile: Profile, *, width: int | None = None
) -> None:
    """All-reduce algorithms, fastest first."""
    console = make_console(width)
    console.print(answer_grid(algorithms_answer(comparison, profile)))
    console.print()
    table = titled_table("all_reduce", ("algorithm", "l"), ("time", "r"), ("against best", "r"))
    least = min(comparison.times_ns.values())
    for name, ns in sorted(comparison.times_ns.items(), key=lambda pair: pair[1]):
        table.add_row(
            name.replace("_", "-"), duration(ns), f"x{factor(ns / least)}" if least else "-"
        )
    console.print(table)


def _headline(profile: Profile) -> str:
    facts = [profile.host, profile.device, f"torch {profile.torch}"]
    if profile.backend:
        facts.append(f"{counted(profile.world_size, 'rank')}, {profile.backend}")
    elif profile.kind == "cpu":
        facts.append(counted(profile.threads, "thread"))
    return " · ".join(facts)


def _machine(profile: Profile) -> Table:
    table = titled_table("machine", ("ceiling", "l"), ("measured", "r"), ("spread", "r"))
    for label, value, spread in machine_rows(profile):
        table.add_row(label, value, percent(spread))
    return table


def _collectives(profile: Profile, *, wide: bool) -> Table:
    rows = collective_rows(profile)
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
            "sizes": f"{binary_size(row.from_bytes)} - {binary_size(row.to_bytes)}",
            "latency": duration(row.latency_ns),
            "algbw": significant(row.algbw_gb_s),
            "busbw": significant(row.busbw_gb_s),
            "held out": percent(row.held_out),
            "noise": percent(row.noise),
        }
        table.add_row(*(cells[name] for name, _ in columns))
    return table
