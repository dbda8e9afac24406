"""What may be shown of a text that is edited, without a server."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from made_room import made_costs, made_run
from msgspec.structs import replace

from stepscope.records.explanation import Finding
from stepscope.records.source_lines import BatchPlace, LineCost, LineCosts
from stepscope.ui.editor.batch_size import batch_now
from stepscope.ui.editor.edits import LineChange, line_changes, rebase, text_lines
from stepscope.ui.lsp.annotations import block_costs
from stepscope.ui.lsp.measured_run import MeasuredRun, note_finding, samples_of_step, step_on_gpus
from stepscope.ui.lsp.script_jobs import discard_old_runs, find_runs, new_editor_run
from stepscope.ui.lsp.script_state import (
    EditorSettings,
    ScriptState,
    program_key,
    qualified_name,
    shown_lines,
)
from stepscope.ui.lsp.serve_editor import panel_of

FILE = Path("/home/train.py")
LINES = [
    "x = 1",
    "y = f(x)  # 2.0 ms",
    "for i in y:",
    "    g(i)  # 3.0 ms",
    "",
    "# a note",
    "z = (",
]
texts = st.lists(st.sampled_from(LINES), max_size=8).map(lambda lines: "\n".join([*lines, ""]))


def apply(text: str, changes: list[LineChange]) -> str:
    lines = text_lines(text)
    for change in sorted(changes, key=lambda one: one.start, reverse=True):
        lines[change.start : change.end] = change.lines
    return "".join(lines)


@settings(max_examples=50)
@given(before=texts, now=texts)
def test_a_value_is_current_only_for_the_same_line_of_the_same_program(
    before: str, now: str
) -> None:
    state = ScriptState(script=FILE, measured=made_run(FILE, before, Path("/run")))
    for shown in shown_lines(state, FILE, now, lambda _: now):
        assert 1 <= shown.line <= len(text_lines(now))
        if shown.trust == "measured":
            assert before == now or program_key(before) == program_key(now) is not None
            old, new = text_lines(before)[shown.cost.line - 1], text_lines(now)[shown.line - 1]
            assert old.strip() == new.strip()


@settings(max_examples=50)
@given(measured=texts, estimated=texts, now=texts)
def test_an_estimate_counts_only_for_its_own_text(measured: str, estimated: str, now: str) -> None:
    state = ScriptState(script=FILE, measured=made_run(FILE, measured, Path("/run")))
    state.set_estimate(made_costs(FILE, estimated, kind="estimated"), None)
    for shown in shown_lines(state, FILE, now, lambda _: now):
        if shown.trust == "estimated":
            assert estimated == now or program_key(estimated) == program_key(now) is not None
            assert shown.estimated


@settings(max_examples=50)
@given(before=texts, after=texts, now=texts)
def test_a_change_is_rebased_and_taken_back_or_refused(before: str, after: str, now: str) -> None:
    assert apply(before, line_changes(before, after)) == after
    moved = rebase(before, after, now)
    if moved is None:
        return
    patched = apply(now, moved)
    if before == now:
        assert patched == after
    # Nothing but the changed lines is touched.
    changed = sum(len(change.lines) - (change.end - change.start) for change in moved)
    assert len(text_lines(patched)) == len(text_lines(now)) + changed


def test_a_change_made_once_is_not_offered_again() -> None:
    before = "a\nb\nc\n"
    after = "a\nnew\nb\nc\n"
    assert rebase(before, after, "top\n" + before) == [LineChange(2, 2, ("new\n",))]
    assert rebase(before, after, after) is None
    assert rebase(after, before, after) == [LineChange(1, 2, ())]
    assert rebase(before, after, "a\nother\nb\nc\n") is None


def test_a_form_feed_ends_no_line_and_a_mark_is_no_code() -> None:
    assert text_lines("a\x0cb\nc\u2028d") == ["a\x0cb\n", "c\u2028d"]
    assert text_lines("a\r\nb\r\n") == ["a\n", "b\n"]
    assert program_key("\ufeffx = 1") == program_key("x  =  1 # same") is not None
    assert program_key("x = (") is None


def test_the_panel_has_the_step_on_other_gpus(golden: Path) -> None:
    rows = step_on_gpus(golden / "h200-resnet18")
    measured = replace(made_run(FILE, "x = 1  # 2.0 ms\n", Path("/run")), gpus=rows)
    between = msgspec.json.decode(msgspec.json.encode(measured), type=MeasuredRun)
    assert between == measured  # as it comes from the child
    gpus = panel_of(ScriptState(script=FILE, measured=between), lambda _: None)["gpus"]
    assert {"gpu", "stepMs", "lowMs", "highMs", "fits", "decides"} == set(gpus[0])
    assert [row["stepMs"] for row in gpus] == sorted(row["stepMs"] for row in gpus)
    assert all(row["lowMs"] <= row["stepMs"] <= row["highMs"] for row in gpus)


def test_two_functions_of_one_name_have_two_full_names() -> None:
    method = "    def f(self):\n        x = 1\n\n"
    text = f"class A:\n{method}class B:\n{method}x = 1\n"
    assert [qualified_name(text, line) for line in (3, 5, 7, 9)] == ["A.f", "", "B.f", ""]


def test_the_batch_size_is_followed_where_another_number_equals_it() -> None:
    before = "size = 64\nloader = DataLoader(data, batch_size=64)\n"
    costs = made_costs(FILE, before)
    now = "# note\nsize = 64\nloader = DataLoader(data, batch_size=128)\n"
    place = batch_now(costs, FILE, now)
    assert place is not None
    assert (place.line, place.value) == (3, 128)
    assert now.split("\n")[2][place.column : place.end_column] == "128"
    assert place.also == ()
    gone = batch_now(costs, FILE, "size = 64\nloader = make(data)\n")
    assert gone is None or gone.line != 1


def test_settings_say_what_is_wrong_and_keep_the_rest() -> None:
    values = {"limitSeconds": 0, "hints": False, "arguments": {"jobs/*.py": ["--a"], "*": ["--b"]}}
    chosen, wrong = EditorSettings().updated({"stepscope": values})
    assert wrong == ("stepscope.limitSeconds is 0: expected seconds, from 1 to 86400",)
    assert not chosen.hints
    assert chosen.arguments_of(Path("/w/jobs/a.py"), [Path("/w")]) == ("--a",)
    assert chosen.arguments_of(Path("/w/b.py"), [Path("/w")]) == ("--b",)
    assert EditorSettings().updated(["nonsense"]) == (EditorSettings(), ())


def test_runs_are_found_by_their_command_and_old_ones_of_editors_go(tmp_path: Path) -> None:
    script = tmp_path.resolve() / "train.py"
    made = []
    for number in range(13):
        run = new_editor_run(script)
        (run / "rank-00000").mkdir(parents=True)
        (run / "run.json").write_text(
            f'{{"command": ["python", "train.py"], "folder": "{tmp_path}"}}'
        )
        os.utime(run / "run.json", (number, number))
        made.append(run)
    other = tmp_path / "stepscope-runs" / "mine"
    other.mkdir()
    (other / "run.json").write_text('{"command": ["python", "/elsewhere/train.py"]}')
    assert find_runs(script, [tmp_path.resolve()]) == made[::-1]
    discard_old_runs(made[-1])
    assert find_runs(script, []) == made[:2:-1]
    assert other.exists()


def test_a_loop_that_is_all_of_its_function_is_not_shown_twice() -> None:
    text = "def train():\n    for b in d:\n        f(b)  # 3.0 ms\ndef test():\n    g()  # 1.0 ms\n"
    lines = shown_lines(
        ScriptState(script=FILE, measured=made_run(FILE, text, Path("/run"))),
        FILE,
        text,
        lambda _: text,
    )
    assert [block.line for block in block_costs(text, lines)] == [1, 4]


def test_a_finding_without_a_place_stands_at_the_line_that_it_is_about() -> None:
    def line(number: int, forward_ms: float, other_ms: float) -> LineCost:
        name, times = str(FILE), {"forward_ms": forward_ms, "other_ms": other_ms}
        return LineCost(file=name, line=number, function="train", **times)

    costs = LineCosts(lines=(line(3, 60, 1), line(2, 0, 38)), step_ms=100, texts={str(FILE): ""})

    def at(finding: str, share: float) -> int:
        one = Finding(id=finding, title="", share=share, severity="low", summary="", evidence=())
        return note_finding(one, FILE, costs, ()).places[0].line

    assert at("data-loading", 0.38) == 2
    assert at("dominant-kernel", 0.6) == 3
    assert at("data-loading", 0.9) == 1  # no line accounts for it
    assert at("other-processes", 0.3) == 1


def test_samples_are_the_scripts_own_number_where_the_first_dimension_cannot_be() -> None:
    number = BatchPlace(line=1, column=0, end_column=2, value=20, spelling="batch_size=")

    def samples(
        seen: int | None, batches: int = 1, place: BatchPlace | None = number
    ) -> int | None:
        costs = LineCosts(lines=(), step_ms=1.0, batch=seen, batches_per_step=batches)
        return samples_of_step(costs, place)

    assert samples(35) == 20  # 35 tokens of 20 samples
    assert samples(80) == 80  # 20 on each of 4 devices, or 4 views of each
    assert samples(35, place=None) == 35
    assert samples(None) == 20
    assert samples(20, batches=4) == 80  # gradients of 4 batches accumulate
    assert samples(5, batches=4) == 20  # the script divides its batch by 4
    assert samples(35, batches=4) == 80
    assert samples(35, batches=4, place=None) == 140
    assert samples(None, batches=4, place=None) is None
