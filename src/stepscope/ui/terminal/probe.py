"""A probe and the library of operator times in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.shapes import MOST, shape_words
from stepscope.predict.operator_library import library_file
from stepscope.records.figures import milliseconds, percent, signed_percent, significant
from stepscope.records.probe_report import OUT_OF_TIME
from stepscope.records.words import counted
from stepscope.ui.answer import Answer
from stepscope.ui.probe_json import count_places
from stepscope.ui.terminal.console import make_console, note_line, print_path
from stepscope.ui.terminal.tables import answer_grid, fitting_table
from stepscope.ui.words import or_dash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.operator_times import OperatorTime
    from stepscope.records.probe_report import ProbedOperator, ProbeReport

_MOST_ROWS = 12


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
    failed = [operator for operator in report.unprobed if operator.why != OUT_OF_TIME]
    for operator in failed[:_MOST_ROWS]:
        mode = f" in {operator.mode}" if operator.mode else ""
        shapes = shape_words(operator.shapes, MOST)
        share = f"{percent(operator.share)} of the operators"
        console.print(
            note_line(f"not timed{mode}: {operator.name} {shapes} ({share}): {operator.why}")
        )
    if len(failed) < len(report.unprobed):
        console.print(note_line(_out_of_time(report)))
    if (more := len(failed) - _MOST_ROWS) > 0:
        console.print(note_line(f"and {more} more; --json lists them"))
    for note in report.notes:
        console.print(note_line(note))
    print_path(console, "library ", library_file())


def _out_of_time(report: ProbeReport) -> str:
    late = [operator for operator in report.unprobed if operator.why == OUT_OF_TIME]
    calls = {(operator.name, operator.shapes): operator.share for operator in late}
    share = percent(sum(calls.values()))
    return (
        f"{counted(len(calls), 'call')} ({share} of the operators' time): {OUT_OF_TIME}; "
        "--budget gives more"
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
        console.print("the library is empty: `stepscope probe PATH` fills it")
    print_path(console, "library ", library_file())


def _answer(report: ProbeReport, path: str) -> Answer:
    timed = sum(row.probed_ms is not None for row in report.operators)
    verdict = (
        f"{percent(report.probed_share)} of the step's operators are timed on {report.place}: "
        f"{counted(timed, 'distinct call')}"
    )
    why = "nothing was timed"
    if report.difference is not None:
        why = (
            f"as traced they take {milliseconds(report.same_probed_ms)} alone and "
            f"{milliseconds(report.same_traced_ms)} in the trace "
            f"({signed_percent(report.difference)})"
        )
    wanted = report.modes[0] if report.modes else "bf16"
    verb = "whatif" if report.modes else "probe"
    return Answer(
        verdict=verdict, why=why, next=f"stepscope {verb} {path} --set precision={wanted}"
    )


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
