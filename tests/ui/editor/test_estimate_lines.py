"""Estimates of an edited text, with operators and times made up: worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from stepscope.errors import NotCapturedError
from stepscope.explain.line_costs import OperatorTimes
from stepscope.records.source_lines import LineCost, LineCosts
from stepscope.ui.editor import line_costs
from stepscope.ui.editor.fake_run import FakeAnswer, FakeScript, LineCall
from stepscope.ui.editor.line_costs import check_syntax, estimate_script

Estimated = Callable[[str, FakeAnswer], LineCosts]
FILE = "/work/train.py"
BEFORE = "import torch\ny = model(x)\noptimizer.step()\n"
# forward 8 ms, backward 16 ms where fakes count 4 and 8: what is measured is twice as much
MEASURED = LineCosts(
    lines=(
        LineCost(file=FILE, line=2, function="main", forward_ms=8, backward_ms=16, other_ms=1,
                 kept_bytes=100, calls=1),
        LineCost(file=FILE, line=3, function="main", optimizer_ms=3, other_ms=0.5, calls=1),
    ),
    step_ms=30,
    other_ms=1.5,
    peak_bytes=1000,
    run="/work/run",
    texts={FILE: BEFORE},
)  # fmt: skip
TIMES = OperatorTimes(
    {
        ("aten::mm", ((8, 8), (8, 8)), "float"): 4.0,
        ("aten::mul", ((8, 8),), "float"): 1.0,
        ("aten::add_", ((8, 8), (8, 8)), "float"): 3.0,
    }
)


def call(line: int, phase: str, name: str, *shapes: tuple[int, ...], count: int = 1) -> LineCall:
    sizes, dtypes = [list(shape) for shape in shapes], ["float"] * len(shapes)
    return LineCall(FILE, line, "main", phase, name, sizes, dtypes, count)


def product(line: int, rows: int = 8) -> list[LineCall]:
    shapes = ((rows, 8), (8, 8))
    return [
        call(line, "forward", "aten::mm", *shapes),
        call(line, "backward", "aten::mm", *shapes, count=2),
    ]


def update(line: int) -> LineCall:
    return call(line, "optimizer", "aten::add_", (8, 8), (8, 8))


ANSWERS = {
    BEFORE: FakeAnswer(None, [*product(2), update(3)], [(FILE, 2, 100)], 64),
}


@pytest.fixture
def estimated(monkeypatch: pytest.MonkeyPatch) -> Estimated:
    """A text and what fakes find in it -> its costs."""

    def of(text: str, answer: FakeAnswer) -> LineCosts:
        answers = {**ANSWERS, text: answer}

        def fake(script: FakeScript, *_: object) -> FakeAnswer:
            return answers[dict(script.texts)[FILE]]

        monkeypatch.setattr(line_costs, "run_with_fakes", fake)
        monkeypatch.setattr(line_costs, "_fake_baseline", fake)
        monkeypatch.setattr(line_costs, "_times_of", lambda *_: TIMES)
        return estimate_script(Path(FILE), {Path(FILE): text}, [], limit_s=1, measured=MEASURED)

    return of


def test_an_unchanged_text_costs_what_was_measured(estimated: Estimated) -> None:
    costs = estimated(BEFORE, ANSWERS[BEFORE])
    assert costs.step_ms == pytest.approx(30)
    assert costs.kind == "estimated"
    assert costs.peak_bytes == 1000
    assert [cost.total_ms for cost in costs.lines] == [25, 3.5]
    assert costs.notes == ()


def test_a_new_line_gets_its_operators_times_as_measured_ones_compare(estimated: Estimated) -> None:
    text = BEFORE.replace("optimizer", "z = y @ y\noptimizer")
    answer = FakeAnswer(
        None, [*product(2), *product(3), update(4)], [(FILE, 2, 100), (FILE, 3, 50)], 64
    )
    costs = estimated(text, answer)
    new = costs.at(FILE, 3)
    assert new is not None
    assert (new.forward_ms, new.backward_ms, new.other_ms, new.kept_bytes) == (8, 16, 0, 50)
    moved = costs.at(FILE, 4)
    assert moved is not None
    assert moved.total_ms == 3.5
    assert costs.step_ms == pytest.approx(54)
    assert costs.peak_bytes == 1050


def test_a_changed_line_is_scaled_and_said_to_be(estimated: Estimated) -> None:
    text = BEFORE.replace("model(x)", "model(x2)")
    answer = FakeAnswer(None, [*product(2, rows=16), update(3)], [(FILE, 2, 200)], 128)
    costs = estimated(text, answer)
    changed = costs.at(FILE, 2)
    assert changed is not None
    assert (changed.forward_ms, changed.backward_ms, changed.other_ms) == (16, 32, 1)
    assert costs.peak_bytes is None  # the parameters changed
    assert "is scaled from operators" in costs.notes[0]


def test_a_line_whose_operators_only_grow_is_scaled_from_what_it_took(
    estimated: Estimated,
) -> None:
    text = BEFORE.replace("optimizer.step()", "optimizer.step()  # larger")
    grown = call(3, "optimizer", "aten::add_", (16, 8), (16, 8), count=2)
    line = estimated(text, FakeAnswer(None, [*product(2), grown], [], 64)).at(FILE, 3)
    assert line is not None
    assert line.optimizer_ms == pytest.approx(3 * 2 * 2)  # twice the bytes, twice the calls
    assert line.calls is None  # it may run twice, or call twice


def test_other_operators_on_a_line_are_scaled_as_all_lines_are(estimated: Estimated) -> None:
    text = BEFORE.replace("model(x)", "x * 2")
    answer = FakeAnswer(None, [call(2, "forward", "aten::mul", (8, 8)), update(3)], [], 64)
    line = estimated(text, answer).at(FILE, 2)
    assert line is not None
    assert line.forward_ms == pytest.approx(2)


def test_lines_of_an_imported_file_are_followed_and_estimated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line is put before the one that was measured there."""
    imported = "/work/net.py"
    cost = LineCost(file=imported, line=1, function="forward", forward_ms=4, calls=1)
    known = replace(MEASURED, lines=(*MEASURED.lines, cost), texts={FILE: BEFORE, imported: "a()"})

    def fake(script: FakeScript, *_: object) -> FakeAnswer:
        line = len(dict(script.texts)[imported].splitlines())
        own = replace(call(line, "forward", "aten::mm", (8, 8), (8, 8)), file=imported)
        return replace(ANSWERS[BEFORE], calls=[*ANSWERS[BEFORE].calls, own])

    monkeypatch.setattr(line_costs, "run_with_fakes", fake)
    monkeypatch.setattr(line_costs, "_times_of", lambda *_: TIMES)
    edited = {Path(imported): "x = 1\na()"}
    costs = estimate_script(Path(FILE), edited, [], limit_s=1, measured=known)
    assert [one.line for one in costs.lines if one.file == imported] == [2]
    assert costs.texts == {FILE: BEFORE, imported: "x = 1\na()"}
    with pytest.raises(NotCapturedError, match=r"net\.py, line 1"):
        estimate_script(Path(FILE), {Path(imported): "a("}, [], limit_s=1, measured=known)


def test_a_line_without_operators_left_keeps_its_python(estimated: Estimated) -> None:
    text = BEFORE.replace("y = model(x)", "y = 1")
    costs = estimated(text, FakeAnswer(None, [update(3)], [], 64))
    line = costs.at(FILE, 2)
    assert line is not None
    assert (line.total_ms, line.kept_bytes) == (1, 0)


def test_why_nothing_can_be_said() -> None:
    with pytest.raises(NotCapturedError, match=r"a\.py, line 2: "):
        check_syntax(Path("a.py"), "x = 1\nif x\n")
    with pytest.raises(NotCapturedError, match="profile it once"):
        estimate_script(Path("/work/other.py"), {}, [], limit_s=1, measured=MEASURED)
