"""`stepscope compare` as a user meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[1] / "verify"))

from folders import noisy, write_run
from traced import write_trace

from stepscope.errors import SlowerError, StepscopeError, UsageError
from stepscope.records.comparison import Difference
from stepscope.records.folders import node_name
from stepscope.records.prediction import Promise, Setting
from stepscope.text.figures import signed, signed_percent, significant, unsigned_percent
from stepscope.ui.cli.compare import command
from stepscope.ui.terminal.comparison import draw_interval
from stepscope.ui.topics.comparison import comparison_answer, merged_notes
from stepscope.verify.compare import compare
from stepscope.verify.track_record import remember
from verb_process import run_verb

CONTRACT = {
    "schema", "a_ms", "b_ms", "change", "low", "high", "confidence", "verdict",
    "smallest_detectable",
}  # fmt: skip


def invoke(*arguments: object) -> Result:
    """In this process: what a verb raises is looked at, not printed."""
    return CliRunner().invoke(command, [*map(str, arguments)], standalone_mode=False)


def told(*arguments: object) -> str:
    done = invoke(*arguments)
    if done.exception:
        raise done.exception
    return done.output


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """20 ms before, 18 ms after."""
    a = write_run(tmp_path / "a", noisy(20, seed=1), peak_bytes=4_000_000_000)
    b = write_run(tmp_path / "b", noisy(18, seed=2), peak_bytes=3_000_000_000, torch="2.14")
    return a, b


def test_verdict_why_and_next_come_first(runs: tuple[Path, Path]) -> None:
    lines = told(*runs).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["verdict", "why", "next"]
    assert "B is faster: 20.0 -> 18.0 ms a step, 9.9% less" in lines[0]
    shown = "\n".join(lines)
    for words in (
        "stepscope ab -- COMMAND_A --- COMMAND_B",
        "95th percentile",
        "peak 4.00 GB -> 3.00 GB, -25%",
        "phases of the loop",
        "torch",
        "one run on each side",
    ):
        assert words in shown


def test_json_keeps_the_contract_and_prints_nothing_else(runs: tuple[Path, Path]) -> None:
    body = json.loads(told(*runs, "--json"))
    assert body.keys() >= CONTRACT
    assert body["schema"] == 1
    assert body["verdict"] == "faster"
    assert body["change"] == pytest.approx(-0.1, abs=0.01)
    assert body["low"] < body["change"] < body["high"] < 0
    assert 0 < body["smallest_detectable"] < 0.05
    assert body["confidence"] == 0.95


def test_same_against_same_is_no_difference(runs: tuple[Path, Path]) -> None:
    assert "No difference seen" in told(runs[0], runs[0])


def test_several_runs_a_side(tmp_path: Path) -> None:
    a = [write_run(tmp_path / f"a{i}", noisy(20, seed=i)) for i in range(3)]
    b = [write_run(tmp_path / f"b{i}", noisy(22, seed=10 + i)) for i in range(2)]
    body = json.loads(told(*a, "--against", *b, "--json"))
    assert (len(body["a"]["runs"]), len(body["b"]["runs"])) == (3, 2)
    assert body["verdict"] == "slower"
    assert body["between_starts"] is None
    shown = told("--against", *b, "--top", "3", *a[:0], "--", *a)
    assert "runs" in shown


def test_exit_5_only_where_it_is_surely_slower_by_more(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", noisy(20, seed=1))
    b = write_run(tmp_path / "b", noisy(22, seed=2))
    done = invoke(a, b, "--fail-on-slower", "3%")
    assert isinstance(done.exception, SlowerError)
    assert done.exception.exit_code == 5
    assert "B is slower" in done.output  # the answer is there all the same
    assert invoke(a, b, "--fail-on-slower", "9.5%").exception is None  # 10%, but not surely 9.5%
    assert invoke(b, a, "--fail-on-slower", "0.03").exception is None
    assert invoke(a, a, "--fail-on-slower", "0%").exception is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a"], "two sides are compared"),
        (["a", "b", "c"], "--against B1 B2"),
        (["a", "--against"], "name B's runs after it"),
        (["a", "b", "--html", "no/such/folder/x.html"], "its folder does not exist"),
        (["a", "b", "--promise", "x", "--no-promise"], "contradict"),
        (["a", "b", "--promise", "x"], "no prediction has that id"),
    ],
)
def test_wrong_use_says_what_to_do(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(runs[0].parent)
    done = invoke(*arguments)
    assert isinstance(done.exception, UsageError)
    assert says in str(done.exception)


def test_a_share_is_a_percentage_or_a_fraction(runs: tuple[Path, Path]) -> None:
    done = invoke(*runs, "--fail-on-slower", "300%")
    assert "write 3% or 0.03" in str(done.exception)


def test_step_lists_with_their_unit(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x_s,y_s\n" + "\n".join(f"1,{ms / 1e3}" for ms in noisy(20)))
    (tmp_path / "b.csv").write_text("x_s,y_s\n" + "\n".join(f"1,{ms / 1e3}" for ms in noisy(24)))
    files = (tmp_path / "a.csv", tmp_path / "b.csv")
    assert "has several columns" in str(invoke(*files).exception)
    body = json.loads(told(*files, "--column", "y_s", "--json"))
    assert body["a_ms"] == pytest.approx(20, rel=0.01)
    assert body["steps_are"] == "listed"


def test_the_page_draws_what_moved_and_both_sides(
    runs: tuple[Path, Path], fused: tuple[Path, Path], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    told(*runs, "--html", page)
    text = page.read_text()
    assert "B is faster" in text
    for section in ("verdict", "moved", "steps", "tables"):
        assert f'<section id="{section}"' in text
    for absent in ("parts", "timelines"):  # there is no trace
        assert f'<section id="{absent}"' not in text
    assert "http://" not in text.replace("http-equiv", "")
    assert "https://" not in text
    told(*fused, "--html", page)
    text = page.read_text()
    for section in ("verdict", "moved", "steps", "parts", "timelines", "tables"):
        assert f'<section id="{section}"' in text
    assert "https://" not in text


def test_a_page_of_step_lists_has_no_waterfall(tmp_path: Path) -> None:
    a, b, page = (tmp_path / name for name in ("a.txt", "b.txt", "page.html"))
    a.write_text("\n".join(map(str, noisy(10, seed=1))))
    b.write_text("\n".join(map(str, noisy(12, seed=2))))
    told(a, b, "--html", page)
    assert '<section id="steps"' in page.read_text()
    assert '<section id="moved"' not in page.read_text()


@pytest.fixture
def fused(tmp_path: Path) -> tuple[Path, Path]:
    """20 ms with an optimizer's loop, 18 ms with a fused one, both traced."""
    a = write_run(tmp_path / "loop", noisy(20, seed=1))
    b = write_run(tmp_path / "fused", noisy(18, seed=2), command=["python", "train.py", "--fused"])
    write_trace(a / "rank-00000")
    write_trace(b / "rank-00000", optimizer="fused")
    return a, b


def promised(a: Path, setting: str = "optimizer=fused") -> Promise:
    name, _, value = setting.partition("=")
    return remember(
        Promise(
            id="abc",
            when_unix=1.0,
            host=node_name(),
            settings=(Setting(name=name, value=value),),
            baseline_ms=20.0,
            predicted_ms=17.0,
            low_ms=16.0,
            high_ms=17.5,
            workload=compare([str(a)], [str(a)]).workload,
        )
    )


def test_a_promise_is_answered_and_told(fused: tuple[Path, Path]) -> None:
    promised(fused[0])
    assert "promise" not in told(*fused, "--no-promise")
    shown = " ".join(told(*fused).split())
    assert "the prediction for optimizer=fused was 17.0 ms (16.0 to 17.5)" in shown
    assert "The result is 18.0 ms" in shown
    assert "outside the interval" in shown
    assert json.loads(told(*fused, "--json"))["promise"] is None  # it is answered
    again = json.loads(told(*fused, "--json", "--promise", "abc"))["promise"]
    assert again["inside"] is False
    assert again["error"] == pytest.approx(18 / 17 - 1, abs=0.01)
    assert again["delivery"]["seen"] == ["optimizer loop -> fused"]


def test_why_a_promise_stays_open_is_told(fused: tuple[Path, Path], tmp_path: Path) -> None:
    promised(fused[0], "precision=bf16")
    shown = " ".join(told(*fused).split())
    assert "precision=bf16 (abc) stays open: B does not show precision=bf16" in shown
    body = json.loads(told(*fused, "--json", "--promise", "abc"))
    assert body["promise"] is None
    assert [each["id"] for each in body["open_promises"]] == ["abc"]
    page = tmp_path / "page.html"
    told(*fused, "--html", page)
    assert "stays open" in page.read_text()


def test_a_narrow_terminal_is_wide_enough(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepscope.ui.terminal import comparison
    from stepscope.ui.terminal.console import make_console

    narrow = make_console(60)
    monkeypatch.setattr(comparison, "make_console", lambda _: narrow)
    for line in told(*runs).splitlines():
        assert len(line) <= 60
        assert "…" not in line  # no number is cut


def test_of_two_long_commands_the_words_that_differ_are_shown(
    tmp_path: Path,
) -> None:
    rest = [f"--option-{n}" for n in range(20)]
    a = write_run(tmp_path / "a", noisy(20, seed=1), command=["python", "--lr", "1", *rest])
    b = write_run(tmp_path / "b", noisy(20, seed=2), command=["python", "--lr", "22", *rest])
    (line,) = [line for line in told(a, b).splitlines() if line.startswith("command")]
    assert line.split() == ["command", "…", "1", "…", "…", "22", "…"]


def test_the_picture_of_an_interval_by_hand() -> None:
    # from -0.045 to 0.345 in 40 spaces: zero lies 0.045 / 0.39 x 40 = 4.6 from the left
    line, labels = draw_interval(0.1, 0.2, 0.3, 41)
    assert line == "·····│·········├─────────●─────────┤·····"
    assert labels.split() == ["0", "+10.0%", "+20%", "+30%"]


@pytest.mark.parametrize("share", [-0.2, 0.0, 0.3])
def test_an_interval_without_width_is_one_mark(share: float) -> None:
    line, _ = draw_interval(share, share, share, 40)
    assert len(line) == 40
    assert line.count("●") == 1


def test_what_rounds_to_nothing_is_no_signed_zero(tmp_path: Path) -> None:
    assert [signed_percent(x) for x in (0.0, -0.00004, 0.00004)] == ["0%"] * 3
    same = tmp_path / "same.txt"
    same.write_text("10\n" * 100)
    printed = told(same, same)
    assert "would have found a change of less than 0.01%" in " ".join(printed.split())
    assert "0.00%" not in printed


def test_steps_below_a_millisecond_keep_their_digits() -> None:
    assert [significant(x) for x in (162.171, 1.0, 0.98765, 0.0123456)] == [
        "162",
        "1.00",
        "0.988",
        "0.0123",
    ]


def test_what_next_fits_what_was_compared(tmp_path: Path) -> None:
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("\n".join(map(str, noisy(10, seed=1))))
    b.write_text("\n".join(map(str, noisy(12, seed=2))))
    printed = told(a, b)
    assert "run folder" not in printed  # lists have none
    assert "capture both with stepscope run" in printed
    found = compare([str(a)], [str(b)])
    other = replace(found, config=(Difference(name="shapes", a="[8]", b="[16]"),))
    assert "compare samples per second" in comparison_answer(other).next


def test_the_parts_table_has_the_verdicts_steps_as_its_total(golden: Path, tmp_path: Path) -> None:
    traces = (
        golden / "h200-resnet18/rank-00000/trace.json.gz",
        golden / "cpu-two-ranks/rank-00000/trace.json.gz",
    )
    page = tmp_path / "page.html"
    printed = told(*traces, "--html", page)
    found = compare([str(traces[0])], [str(traces[1])])
    steps = f"{significant(found.a_ms)} -> {significant(found.b_ms)} ms"
    assert f"B is faster: {steps} a step" in " ".join(printed.split())
    assert f"parts of the profiled step  {steps}" in printed
    text = page.read_text()
    assert "Parts of the profiled step" in text
    assert f'<td>The step</td><td class="number">{significant(found.a_ms)}</td>' in text


def test_on_a_cpu_operators_are_not_listed_twice(fused: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    printed = told(*fused, "--html", page)
    assert "operators, ms a step" in printed
    assert "kernels, ms a step" not in printed
    assert "Kernels</h3>" not in page.read_text()
    assert "Operators</h3>" in page.read_text()
    assert json.loads(told(*fused, "--json"))["kernels"] == []


def test_why_is_of_all_measured_steps_and_never_of_the_trace(
    fused: tuple[Path, Path],
) -> None:
    """Seen: data -7.23 ms from three traced steps, where the table said data +0.23."""
    found = compare([str(fused[0])], [str(fused[1])])
    rows = tuple(replace(row, change_ms=-7.23) for row in found.budget)
    why = comparison_answer(replace(found, budget=rows)).why
    assert "7.23" not in why
    for phase in ("forward", "backward"):
        (row,) = [row for row in found.phases if row.id == phase]
        assert f"{phase} {signed(row.change_ms)} ms" in why
    still = tuple(replace(row, low_ms=-1.0, high_ms=1.0) for row in found.phases)
    unmoved = comparison_answer(replace(found, budget=rows, phases=still)).why
    assert "no single phase of the loop changed by more than noise" in unmoved
    assert "7.23" not in unmoved


def test_notes_about_both_sides_are_one_line() -> None:
    notes = ["A has only 9 steps: too few", "B has only 8 steps: too few", "whole"]
    assert merged_notes(notes) == ["A has only 9 steps, B has only 8 steps: too few", "whole"]


def test_percentages_have_two_digits_that_count() -> None:
    shares = (0.5, 0.123, 0.0123, 0.00123)
    assert [unsigned_percent(x) for x in shares] == ["50%", "12.3%", "1.23%", "0.12%"]
    assert signed_percent(-0.05) == "-5.0%"
    assert signed_percent(0.05) == "+5.0%"


def test_as_a_process_it_ends_with_documented_codes(runs: tuple[Path, Path]) -> None:
    slower = run_verb("compare", runs[1], runs[0], "--json", "--fail-on-slower", "3%")
    assert slower.returncode == 5
    assert json.loads(slower.stdout)["verdict"] == "slower"
    assert "more than the 3.0%" in slower.stderr
    assert run_verb("compare", runs[0], runs[0] / "nothing").returncode == 3
    assert issubclass(SlowerError, StepscopeError)
