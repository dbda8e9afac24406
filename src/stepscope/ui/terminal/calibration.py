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
from stepscope.ui.terminal.console import make_console, note_line, print_path, text_line
from stepscope.ui.terminal.tables import answer_grid, titled_table

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
    console.print(text_line(_headline(profile), style="bright_black"), Text(), sep="\n")
    console.print(answer_grid(calibration_answer(profile)), Text(), _machine(profile), sep="\n")
    if profile.fits:
        console.print(Text(), _collectives(profile, wide=console.width >= _WIDE), sep="\n")
    if contention := contention_sentence(profile):
        console.print(Text(), Text(f"overlap  {contention}"), sep="\n")
    for what, why in profile.not_offered.items():
        by = profile.backend if ", " in what else profile.device
        console.print(note_line(f"{what}: {by} does not offer it: {why}"))
    console.print()
    print_path(console, "profile  ", saved)
    print_path(console, "report   ", report)


def print_comparison(comparison: AlgorithmComparison, profile: Profile) -> None:
    """All-reduce algorithms, fastest first."""
    table = titled_table("all_reduce", "algorithm", ">time", ">against best")
    least = min(comparison.times_ns.values())
    for name, ns in sorted(comparison.times_ns.items(), key=lambda pair: pair[1]):
        against_best = f"x{factor(ns / least)}" if least else "-"
        table.add_row(name.replace("_", "-"), duration(ns), against_best)
    console = make_console()
    console.print(answer_grid(algorithms_answer(comparison, profile)))
    console.print()
    console.print(table)


def _headline(profile: Profile) -> str:
    facts = [profile.host, profile.device, f"torch {profile.torch}"]
    if profile.backend:
        facts.append(f"{counted(profile.world_size, 'rank')}, {profile.backend}")
    elif profile.kind == "cpu":
        facts.append(counted(profile.threads, "thread"))
    return " · ".join(facts)


def _machine(profile: Profile) -> Table:
    table = titled_table("machine", "ceiling", ">measured", ">spread")
    for label, value, spread in machine_rows(profile):
        table.add_row(label, value, percent(spread))
    return table


def _collectives(profile: Profile, *, wide: bool) -> Table:
    rows = collective_rows(profile)
    several = len({row.group for row in rows}) > 1
    columns = ["kind", *(("group", ">ranks") if several else ()), *((">sizes",) if wide else ())]
    columns += [">latency", ">algbw", ">busbw", ">held out", ">noise"]
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
        table.add_row(*(cells[name.lstrip(">")] for name in columns))
    return table
