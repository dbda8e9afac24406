"""Print what was measured on this machine: a calibration, the collectives laboratory, a
probe, and the library of operator times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from stepscope.explain.roofline import MOST, shape_words
from stepscope.predict.operator_library import library_file
from stepscope.records.hardware import (
    OUT_OF_TIME,
    AlgorithmTimes,
    LaboratoryReport,
    OperatorTime,
    ProbedOperator,
    ProbeReport,
    Profile,
    UnprobedOperator,
)
from stepscope.text.figures import (
    binary_size,
    duration,
    factor,
    milliseconds,
    percent,
    signed_percent,
    significant,
)
from stepscope.text.words import counted
from stepscope.ui.terminal.console import (
    answer_grid,
    fitting_table,
    make_console,
    note_line,
    print_path,
    text_line,
    titled_table,
)
from stepscope.ui.topics.measurements import (
    algorithm_name,
    algorithms_answer,
    calibration_answer,
    collective_rows,
    contention_sentence,
    count_places,
    crossover_words,
    crossovers_right,
    kinds_of,
    laboratory_answer,
    link_rows,
    machine_rows,
    of_kind,
)
from stepscope.ui.words import Answer, or_dash

if TYPE_CHECKING:
    from stepscope.predict.collective_times import AlgorithmComparison

# A calibration in a terminal: verdict, why, next; the machine; a line for each collective.

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


# The collectives laboratory in a terminal: a table for each collective, then the crossovers.

_MOST_SIZES = 4


def print_laboratory(
    report: LaboratoryReport, *, page: Path | None = None, width: int | None = None
) -> None:
    """Everything, to stdout."""
    console = make_console(width)
    facts = [report.host, report.device, f"torch {report.torch}"]
    facts.append(f"{counted(report.world_size, 'rank')}, {report.backend}")
    console.print(text_line(" · ".join(facts), style="bright_black"), Text(), sep="\n")
    console.print(answer_grid(laboratory_answer(report)), Text(), _link(report), sep="\n")
    for kind in kinds_of(report):
        console.print(Text(), _algorithms(kind, of_kind(report, kind), console.width), sep="\n")
    if report.crossovers:
        console.print(Text(), _crossovers(report, console.width), sep="\n")
    if page is not None:
        console.print()
        print_path(console, "report   ", page)


def _link(report: LaboratoryReport) -> Table:
    table = titled_table("one step, from probes", "part", ">measured")
    for label, value in link_rows(report):
        table.add_row(label, value)
    return table


def _algorithms(kind: str, algorithms: list[AlgorithmTimes], width: int) -> Table:
    """Measured times at a few sizes; the formula's error over all of them."""
    count = len(algorithms[0].sizes)
    shown = sorted({round(i * (count - 1) / (_MOST_SIZES - 1)) for i in range(_MOST_SIZES)})
    sizes = [binary_size(algorithms[0].sizes[place].size_bytes) for place in shown]
    columns = ["algorithm", ">steps", ">sent", *(f">{size}" for size in sizes), ">formula off"]
    rows = []
    for times in sorted(algorithms, key=lambda one: one.sizes[-1].time_ns):
        cells = [duration(times.sizes[place].time_ns) for place in shown]
        steps = "-" if times.steps is None else str(times.steps)
        sent = "-" if times.sent is None else f"{significant(times.sent)} n"
        off = "-" if times.error is None else percent(times.error)
        rows.append([algorithm_name(times.algorithm), steps, sent, *cells, off])
    spare = [*sizes[1:-1], "sent", "steps"]
    return fitting_table(kind, columns, rows, width=width, spare=spare)


def _crossovers(report: LaboratoryReport, width: int) -> Table:
    right, count = crossovers_right(report.crossovers), len(report.crossovers)
    title = f"crossovers: {right} of {count} predicted within a factor of two"
    columns = ["collective", "from → to", ">predicted", ">measured"]
    rows = [[one.kind, *crossover_words(one)] for one in report.crossovers]
    return fitting_table(title, columns, rows, width=width, spare=["collective"])


# A probe and the library of operator times in a terminal.

_MOST_ROWS = 12
_ENOUGH = 0.5  # of the operators' time, for a what-if to be worth asking
_SMALL = 0.005  # of the operators' time: not worth a line


def print_probe(report: ProbeReport, *, path: str) -> None:
    """Everything, to stdout."""
    console = make_console()
    console.print(answer_grid(_answer(report, path)))
    console.print()
    columns = [
        "operator",
        "shapes",
        ">calls",
        ">traced",
        ">probed",
        *(f">{m}" for m in report.modes),
    ]
    rows = [_row(operator, report.modes) for operator in report.operators[:_MOST_ROWS]]
    console.print(
        fitting_table(
            "operators of a step, both passes, ms",
            columns,
            rows,
            width=console.width,
            spare=["shapes", "calls"],
        )
    )
    for line in _untimed_lines(report.unprobed):
        console.print(note_line(line))
    for note in report.notes:
        console.print(note_line(note))
    print_path(console, "library ", library_file())


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
        words = " ".join(filter(None, (name, shape_words(shapes, MOST))))
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
    """What the library holds, by place."""
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


def _answer(report: ProbeReport, path: str) -> Answer:
    timed = sum(row.probed_ms is not None for row in report.operators)
    verdict = (
        f"{counted(timed, 'distinct call')} timed on {report.place}: "
        f"{percent(report.probed_share)} of the step's operators"
    )
    why = "no operator was timed"
    if report.difference is not None:
        why = (
            f"the operators take {milliseconds(report.same_probed_ms)} alone and "
            f"{milliseconds(report.same_traced_ms)} in the trace "
            f"({signed_percent(report.difference)})"
        )
    return Answer(verdict=verdict, why=why, next=_next(report, path))


def _next(report: ProbeReport, path: str) -> str:
    wanted = _setting(report.modes[0]) if report.modes else "precision=bf16"
    if any(operator.why == OUT_OF_TIME for operator in report.unprobed) and (
        report.probed_share < _ENOUGH
    ):
        asked = "".join(f" --set {_setting(mode)}" for mode in report.modes)
        return f"stepscope probe {path}{asked} --budget {3 * report.budget_s:g}s"
    verb = "whatif" if report.modes else "probe"
    return f"stepscope {verb} {path} --set {wanted}"


def _setting(mode: str) -> str:
    return mode if "=" in mode else f"precision={mode}"


def _row(operator: ProbedOperator, modes: Sequence[str]) -> list[str]:
    def ms(value: float | None) -> str:
        return or_dash(value, significant)

    return [
        operator.name,
        shape_words(operator.shapes, MOST),
        str(operator.count),
        ms(operator.traced_ms),
        ms(operator.probed_ms),
        *(ms(operator.modes_ms.get(mode)) for mode in modes),
    ]
