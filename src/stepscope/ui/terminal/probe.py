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
    from collections.abc import Iterator, Sequence

    from stepscope.records.operator_times import OperatorTime
    from stepscope.records.probe_report import ProbedOperator, ProbeReport, UnprobedOperator

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
