"""Put one input through everything a user would: explain, what-ifs, report, terminal, JSON."""

from __future__ import annotations

import contextlib
import io
import json
from typing import TYPE_CHECKING, Any

from fuzz.sound import check_answer, check_numbers
from stepscope import StepscopeError, UnreadableInputError
from stepscope.changes import PREDICTED
from stepscope.explain.engines import Here
from stepscope.explain.rank import explain_file
from stepscope.predict.whatifs import parse_setting
from stepscope.trace.discover import find_traces
from stepscope.trace.read import ReadOptions
from stepscope.ui.api import explain_paths
from stepscope.ui.json_text import json_text
from stepscope.ui.terminal.explanation import print_explanation
from stepscope.ui.terminal.short import print_short
from stepscope.ui.topics.explanation_json import explanation_json
from stepscope.ui.topics.whatif import make_bench, prediction_json

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.predict.engine import Bench
    from stepscope.records.explanation import Explanation

ANSWERED, REFUSED = "answered", "refused"
_VALUES = {
    "precision": ("bf16", "tf32", "fp16", "fp32"),
    "optimizer": ("fused", "foreach", "loop"),
    "compile": ("", "default", "reduce-overhead"),
    "threads": ("1", "fit", "8"),
    "batch": ("x2", "x0.5", "1"),
    "accumulate": ("2",),
    "checkpoint": ("blocks", "none"),
    "save-memory": ("max", "5%", "0.5", "1GB", "2x"),
    "remove": ("aten::mm", "conv"),
    "scale": ("gemm:0.5",),
    "workers": ("1", "2", "64", "8:strong"),
    "loader-workers": ("0", "2", "8"),
    "zero": ("1", "3"),
    "bucket-mb": ("1", "25"),
    "bandwidth": ("2", "0.1"),
    "latency": ("2",),
    "no-stalls": ("data", "data,gc"),
    "hosts": ("2", "8:10"),
    "fuse": ("2", "32"),
    "consistency": ("bounded:3", "eventual"),
    "gpu": ("H100", "T4"),
}
_WITHOUT_VALUE = {name for name, whatif in PREDICTED.items() if not whatif.takes_value}
CHANGES = [
    *(f"{name}={value}" if value else name for name, values in _VALUES.items() for value in values),
    *sorted(_WITHOUT_VALUE),
]


def drive(path: Path, work: Path, *, cache: bool = False) -> str:
    """`answered` or `refused`; raises whatever escaped, or UnsoundError."""
    try:
        explanation = explain(path, work, cache=cache)
    except StepscopeError as error:
        return refused(error)
    show(explanation)
    for file in find_traces(path)[:1]:
        change(file, cache=cache)
    return ANSWERED


def explain(path: Path, work: Path, *, cache: bool = False) -> Explanation:
    """Explained in this process, with the report written."""
    report = work / "report.html"
    return explain_paths([path], cache=cache, html=report, quiet=True, engine=Here())


def show(explanation: Explanation) -> None:
    """As JSON, whose figures are checked, and in both forms of the terminal."""
    check_answer(as_json(explanation_json(explanation)))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_explanation(explanation)
        print_short(explanation)
    check_numbers(printed.getvalue())
    printed.getvalue().encode()


def change(file: Any, *, cache: bool = False) -> None:
    """Every what-if, alone and two at a time."""
    try:
        _, benches = explain_file(file, make_bench, options=ReadOptions(cache=cache))
    except StepscopeError as error:
        check_numbers(str(error))
        return
    if not benches:
        return
    (bench,) = benches
    try:
        before = bench.predict([])
    except StepscopeError:
        return
    for wanted in [*([each] for each in CHANGES), ["precision=bf16", "batch=x2", "workers=4"]]:
        _predict(bench, wanted, before)


def _predict(bench: Bench, wanted: list[str], before: Any) -> None:
    try:
        after = bench.predict([parse_setting(each) for each in wanted])
    except StepscopeError as error:
        refused(error)
        return
    if after.applied:
        check_numbers(as_json(prediction_json(after, before)))


def as_json(value: Any) -> Any:
    """What a strict reader makes of it."""
    return json.loads(json_text(value))


def refused(error: StepscopeError) -> str:
    """A refusal names the input and is none of our defects."""
    check_numbers(str(error))
    if type(error) is StepscopeError:
        raise error
    if isinstance(error, UnreadableInputError):
        str(error).encode("utf-8", "surrogateescape")
    return REFUSED


assert set(_VALUES) | _WITHOUT_VALUE == set(PREDICTED)
