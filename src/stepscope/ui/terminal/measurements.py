"""Print what was measured on this machine: a calibration, the collectives laboratory, a
probe, and the library of operator times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from stepscope.predict.operator_library import library_file
from stepscope.records.hardware import (
    MOST_SHAPES,
    OUT_OF_TIME,
    LaboratoryReport,
    OperatorTime,
    ProbeReport,
    Profile,
    UnprobedOperator,
    shape_words,
)
from stepscope.text.figures import (
    duration,
    factor,
    milliseconds,
    percent,
    signed_percent,
    significant,
)
from stepscope.text.words import counted
from stepscope.ui.terminal.console import (
    FAINT,
    answer_grid,
    fitting_table,
    make_console,
    note_line,
    print_blocks,
    print_path,
    text_line,
    titled_table,
)
from stepscope.ui.topics.measurements import (
    algorithm_name,
    algorithm_table,
    algorithms_answer,
    calibration_answer,
    collective_table,
    contention_sentence,
    count_places,
    crossover_table,
    kinds_of,
    laboratory_answer,
    link_rows,
    machine_rows,
    of_kind,
)
from stepscope.ui.words import Answer, or_dash

if TYPE_CHECKING:
    from stepscope.predict.collective_times import AlgorithmComparison

_WIDE = 88  # columns that the whole table of collectives needs


def print_calibration(
    profile: Profile, *, saved: Path, report: Path | None = None, width: int | None = None
) -> None:
    console = make_console(width)
    facts = [profile.host, profile.device, f"torch {profile.torch}"]
    if profile.backend:
        facts.append(f"{counted(profile.world_size, 'rank')}, {profile.backend}")
    elif profile.kind == "cpu":
        facts.append(counted(profile.threads, "thread"))
    print_blocks(
        console,
        text_line(" · ".join(facts), style=FAINT),
        answer_grid(calibration_answer(profile)),
        titled_table("machine", "ceiling", ">measured", ">spread", rows=machine_rows(profile)),
    )
    if profile.fits:
        table = collective_table(profile)
        several = len({fit.group for fit in profile.fits}) > 1
        left_out = [*(() if several else ("group", "ranks"))]
        left_out += [] if console.width >= _WIDE else ["sizes"]
        title, columns, rows = table.for_terminal(*left_out)
        console.print(Text(), titled_table(title, *columns, rows=rows), sep="\n")
    if contention := contention_sentence(profile):
        console.print(Text(), Text(f"overlap  {contention}"), sep="\n")
    for what, why in profile.not_offered.items():
        by = profile.backend if ", " in what else profile.device
        console.print(note_line(f"{what}: {by} does not offer it: {why}"))
    console.print()
    print_path(console, "profile  ", saved)
    print_path(console, "report   ", report)


def print_comparison(comparison: AlgorithmComparison, profile: Profile) -> None:
    """Print the times of all-reduce algorithms, the fastest first."""
    least = min(comparison.times_ns.values())
    rows = [
        (algorithm_name(name), duration(ns), f"x{factor(ns / least)}" if least else "-")
        for name, ns in sorted(comparison.times_ns.items(), key=lambda pair: pair[1])
    ]
    print_blocks(
        make_console(),
        answer_grid(algorithms_answer(comparison, profile)),
        titled_table("all_reduce", "algorithm", ">time", ">against best", rows=rows),
    )


_MOST_SIZES = 4


def print_laboratory(
    report: LaboratoryReport, *, page: Path | None = None, width: int | None = None
) -> None:
    console = make_console(width)
    facts = [report.host, report.device, f"torch {report.torch}"]
    facts.append(f"{counted(report.world_size, 'rank')}, {report.backend}")
    print_blocks(
        console,
        text_line(" · ".join(facts), style=FAINT),
        answer_grid(laboratory_answer(report)),
        titled_table("one step, from probes", "part", ">measured", rows=link_rows(report)),
    )
    for kind in kinds_of(report):
        algorithms = sorted(of_kind(report, kind), key=lambda one: one.sizes[-1].time_ns)
        count = len(algorithms[0].sizes)
        shown = sorted({round(i * (count - 1) / (_MOST_SIZES - 1)) for i in range(_MOST_SIZES)})
        cells = algorithm_table(algorithms, shown).for_terminal()
        spare = [column.lstrip(">") for column in cells.columns[4:-2]] + ["sent", "steps"]
        console.print(Text(), fitting_table(*cells, width=console.width, spare=spare), sep="\n")
    if report.crossovers:
        cells = crossover_table(report).for_terminal()
        table = fitting_table(*cells, width=console.width, spare=["collective"])
        console.print(Text(), table, sep="\n")
    if page is not None:
        console.print()
        print_path(console, "report   ", page)


# A probe and the library of operator times.

_MOST_ROWS = 12
_ENOUGH = 0.5  # of the operators' time, for a what-if to be worth asking
_SMALL = 0.005  # of the operators' time: not worth a line


def print_probe(report: ProbeReport, *, path: str) -> None:
    console = make_console()
    columns = [
        "operator",
        "shapes",
        ">calls",
        ">traced",
        ">probed",
        *(f">{m}" for m in report.modes),
    ]
    rows = []
    for operator in report.operators[:_MOST_ROWS]:
        times = [operator.traced_ms, operator.probed_ms, *map(operator.modes_ms.get, report.modes)]
        words = [operator.name, shape_words(operator.shapes, MOST_SHAPES), str(operator.count)]
        rows.append([*words, *(or_dash(ms, significant) for ms in times)])
    title, spare = "operators of a step, both passes, ms", ["shapes", "calls"]
    table = fitting_table(title, columns, rows, width=console.width, spare=spare)
    print_blocks(console, answer_grid(_probe_answer(report, path)), table)
    for line in (*_untimed_lines(report.unprobed), *report.notes):
        console.print(note_line(line))
    print_path(console, "library ", library_file())


def _probe_answer(report: ProbeReport, path: str) -> Answer:
    timed = sum(row.probed_ms is not None for row in report.operators)
    why = "no operator was timed"
    if report.difference is not None:
        why = (
            f"the operators take {milliseconds(report.same_probed_ms)} alone and "
            f"{milliseconds(report.same_traced_ms)} in the trace "
            f"({signed_percent(report.difference)})"
        )
    settings = [mode if "=" in mode else f"precision={mode}" for mode in report.modes]
    late = any(operator.why == OUT_OF_TIME for operator in report.unprobed)
    if late and report.probed_share < _ENOUGH:
        asked = "".join(f" --set {setting}" for setting in settings)
        following = f"stepscope probe {path}{asked} --budget {3 * report.budget_s:g}s"
    elif settings:
        following = f"stepscope whatif {path} --set {settings[0]}"
    else:
        following = f"stepscope probe {path} --set precision=bf16"
    return Answer(
        verdict=f"{counted(timed, 'distinct call')} timed on {report.place}: "
        f"{percent(report.probed_share)} of the step's operators",
        why=why,
        next=following,
    )


def _untimed_lines(unprobed: Sequence[UnprobedOperator]) -> Iterator[str]:
    """The longest first, one line for all precisions of a call; small ones are summed up."""
    shares: dict[tuple[str, str], float] = {}
    modes: dict[tuple[str, str], dict[str, str]] = {}
    for operator in unprobed:
        call = (operator.name, operator.shapes)
        shares[call] = operator.share
        modes.setdefault(call, {})[operator.mode] = operator.why
    late = {call for call, whys in modes.items() if OUT_OF_TIME in whys.values()}
    failed = [call for call in shares if call not in late]
    large = [call for call in failed if shares[call] >= _SMALL][:_MOST_ROWS]
    for call in large:
        name, shapes = call
        why = next(iter(modes[call].values()))
        where = "" if "" in modes[call] else f" in {', '.join(modes[call])}"
        words = " ".join(filter(None, (name, shape_words(shapes, MOST_SHAPES))))
        yield f"not timed{where}: {words} ({percent(shares[call])} of the operators): {why}"
    if more := [call for call in failed if call not in large]:
        share = percent(sum(shares[call] for call in more))
        yield (
            f"not timed: {counted(len(more), 'other call')} ({share} of the operators), listed "
            "with --json"
        )
    if late:
        share = percent(sum(shares[call] for call in late))
        yield (
            f"{counted(len(late), 'call')} ({share} of the operators' time): {OUT_OF_TIME}. "
            "Give more with --budget"
        )


def print_library(times: Sequence[OperatorTime]) -> None:
    """Print what the library holds, by place."""
    console = make_console()
    rows = [
        [place, software, mode or "as traced", str(count)]
        for (place, software, mode), count in count_places(times)
    ]
    if rows:
        columns = ["measured on", "with", "precision", ">calls"]
        table = fitting_table("operator times", columns, rows, width=console.width, spare=["with"])
        console.print(table)
    else:
        console.print("the library is empty. `stepscope probe PATH` fills it")
    print_path(console, "library ", library_file())
