"""Findings with the command that tries their remedies, and with what a tune has measured."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

import stepscope
from stepscope.changes import CHANGES
from stepscope.predict.whatifs import settings_for_remedy
from stepscope.records.explanation import Explanation, Finding, Remedy
from stepscope.ui import tried_remedies
from stepscope.ui.api import explain_paths
from stepscope.ui.html.panes.findings import saving_words
from stepscope.ui.terminal.comparison import print_comparison
from stepscope.ui.terminal.explanation import print_explanation
from stepscope.ui.terminal.short import short_lines
from stepscope.ui.topics.comparison import comparison_facts, comparison_json
from stepscope.ui.topics.explanation_json import explanation_json
from stepscope.ui.tried_remedies import tune_command
from stepscope.verify.answered_predictions import MAKES

GOLDEN = Path(__file__).parent.parent / "golden/h200-resnet18"
COMMAND = ["python", "train me.py", "--name", "a'b"]
QUOTED = "python 'train me.py' --name 'a'\"'\"'b'"
STEP_MS = 24.9  # of the golden run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The golden run as `stepscope run` leaves it."""
    folder = tmp_path / "runs/run"
    shutil.copytree(GOLDEN, folder)
    write_run(folder)
    return folder


def write_run(run: Path, *remedies: str) -> None:
    whole = {"schema": 1, "command": COMMAND, "folder": "/work", "remedies": remedies}
    (run / "run.json").write_text(json.dumps(whole))
    if remedies:
        file = run / "rank-00000/rank.json"
        facts = json.loads(file.read_text())
        facts["remedies"] = [{"id": name, "did": ["x"], "refused": None} for name in remedies]
        file.write_text(json.dumps(facts))


def write_tune(folder: Path, *trials: dict[str, Any], **content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    known = {"command": COMMAND, "folder": "/work", "baseline_ms": STEP_MS, "trials": trials}
    (folder / "tune.json").write_text(json.dumps(known | content))
    return folder


def trial(remedy: str, ms: float, *, kept: bool = False, why: str = "") -> dict[str, Any]:
    return {
        "remedies": [remedy], "measured_ms": ms, "low_ms": ms - 1, "high_ms": ms + 1,
        "kept": kept, "why": why,
    }  # fmt: skip


def explained(path: Path) -> Explanation:
    return explain_paths([path], cache=False, html=None, quiet=True)


def printed(explanation: Explanation) -> str:
    console = Console(file=io.StringIO(), width=140)
    lines = short_lines(explanation, console, more="", report=None)
    return "\n".join(line.plain for line in lines)


def remedies(explanation: Explanation) -> dict[str, Remedy]:
    return {each.id: each for finding in explanation.findings for each in finding.remedies}


def offering(explanation: Explanation, *ids: str) -> Explanation:
    """One finding with these remedies."""
    finding = Finding(
        id="host-bound", title="Host-bound", share=0.5, severity="high", summary="s",
        evidence=(), remedies=tuple(Remedy(id=name, summary=f"do {name}") for name in ids),
    )  # fmt: skip
    return replace(explanation, findings=(finding,))


def with_fixes(monkeypatch: pytest.MonkeyPatch, *ids: str) -> None:
    monkeypatch.setattr(tried_remedies, "APPLIED", dict.fromkeys(ids))


# The command


def test_the_command_is_the_runs_own_quoted_for_a_shell(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fixes(monkeypatch, "compile", "bf16")
    finding = memory_bound(explained(run))
    assert [each.id for each in finding.remedies] == ["compile", "bf16"]
    assert finding.try_command == f"stepscope tune --only compile,bf16 -- {QUOTED}"
    with_fixes(monkeypatch)
    assert memory_bound(explained(run)).try_command is None


def memory_bound(explanation: Explanation) -> Finding:
    (finding,) = [each for each in explanation.findings if each.id == "memory-bound"]
    return finding


def test_a_bare_trace_has_no_command_to_repeat(run: Path) -> None:
    (run / "run.json").unlink()
    bare = shutil.copy(run / "rank-00000/trace.json.gz", run.parent / "trace.json.gz")
    commands = [each.try_command for each in explained(Path(bare)).findings if each.try_command]
    assert commands
    assert all(command.endswith(" -- your command") for command in commands)


def test_what_cannot_be_applied_has_no_command() -> None:
    assert tune_command([], ("python", "t.py")) is None


def test_goals_name_the_remedies_that_lead_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fixes(monkeypatch, "loader-workers", "compile", "bf16")
    plain = tried_remedies.add_origin(explained(run))
    offered = offering(plain, "no-data-wait", "cuda-graphs", "batch", "compile")
    (finding,) = tried_remedies.add_trials(offered, None).findings
    assert finding.try_command == f"stepscope tune --only loader-workers,compile -- {QUOTED}"


def test_a_remedy_in_use_is_not_offered_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_fixes(monkeypatch, "compile", "bf16")
    write_run(run, "bf16")
    command = memory_bound(explained(run)).try_command
    assert command == f"stepscope tune --only compile -- {QUOTED}"


# What was measured


def test_a_measured_remedy_replaces_the_promise_everywhere(run: Path) -> None:
    tune = write_tune(
        run.parent / "tune", trial("bf16", 12.0, kept=True), kept=["bf16"], best_ms=12
    )
    explanation = explained(run)
    bf16 = remedies(explanation)["bf16"]
    assert bf16.tried is not None
    assert bf16.tried.tune == str(tune)
    assert bf16.measured_ms == pytest.approx(STEP_MS - 12)
    assert bf16.measured_low_ms == pytest.approx(STEP_MS - 13)
    assert bf16.measured_high_ms == pytest.approx(STEP_MS - 11)
    words = "bf16 24.9 -> 12.0 ms (11.0 to 13.0), kept"
    assert saving_words(bf16) == ("measured", words)
    assert f"measured: {words}" in printed(explanation)
    assert not any("bf16" in (each.try_command or "") for each in explanation.findings)
    assert explanation.next.startswith("apply what tune measured: bf16 (24.9 -> 12.0 ms)")
    answer = explanation_json(explanation)
    (told,) = {
        json.dumps(each) for row in answer["findings"] for each in row["remedies"] if each["tried"]
    }
    assert json.loads(told)["measured_ms"] == pytest.approx(12.9)
    assert answer["run"]["command"] == COMMAND
    assert [each["tried"]["remedy"] for each in answer["advice"] if each["tried"]] == ["bf16"]


def test_all_tables_name_the_command_and_the_measurement(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fixes(monkeypatch, "compile", "bf16")
    write_tune(run.parent / "tune", trial("bf16", 30.0, why="20% slower"))
    print_explanation(explained(run), width=140)
    text = capsys.readouterr().out
    assert "measured: bf16 24.9 -> 30.0 ms (29.0 to 31.0), not kept: 20% slower" in text
    assert "try: stepscope tune --only compile -- python" in text


def test_what_was_tried_in_vain_is_not_advised_again(run: Path) -> None:
    assert "torch.compile" in explained(run).next
    write_tune(run.parent / "tune", trial("compile", 30.0))
    after = explained(run)
    assert "torch.compile" not in after.next
    assert after.next


def test_a_tune_from_another_pace_is_not_about_this_run(run: Path) -> None:
    """The script was changed since: its step is 30% off the tune's baseline."""
    write_tune(run.parent / "tune", trial("bf16", 12.0), baseline_ms=1.3 * STEP_MS)
    assert remedies(explained(run))["bf16"].tried is None


def test_a_run_at_the_pace_of_the_best_is_not_the_baseline(run: Path) -> None:
    """The patch was applied since: the step is nearer to what was kept."""
    content = {"baseline_ms": 1.1 * STEP_MS, "best_ms": STEP_MS, "kept": ["bf16"]}
    write_tune(run.parent / "tune", trial("bf16", STEP_MS, kept=True), **content)
    explanation = explained(run)
    assert remedies(explanation)["bf16"].tried is None
    assert not explanation.next.startswith("keep")


def test_a_run_with_remedies_is_not_what_a_tune_started_from(run: Path) -> None:
    write_run(run, "tf32")
    write_tune(run.parent / "tune", trial("bf16", 12.0, kept=True))
    explanation = explained(run)
    assert remedies(explanation)["bf16"].tried is None
    assert "with      tf32" in printed(explanation)
    assert explanation_json(explanation)["run"]["remedies"][0]["outcome"] == "applied"


def test_a_tune_folder_is_explained_by_its_baseline(run: Path) -> None:
    tune = write_tune(run.parent / "tune", trial("bf16", 12.0), baseline_ms=9.0)
    shutil.move(run, tune / "baseline")
    bf16 = remedies(explained(tune))["bf16"]
    assert bf16.tried is not None  # however noisy the baseline was


def test_a_damaged_tune_does_no_harm(run: Path) -> None:
    before = explained(run)
    write_tune(run.parent / "tune", trials=[{"remedies": "x", "measured_ms": "y"}, 7])
    assert explained(run).next == before.next


def test_a_report_from_python_has_the_trials_too(run: Path, tmp_path: Path) -> None:
    write_tune(run.parent / "tune", trial("bf16", 12.0, kept=True))
    path = stepscope.write_report(stepscope.explain(run, cache=False), tmp_path / "r.html")
    text = path.read_text()
    assert '<section id="tune"' in text
    assert "bf16 24.9 -&gt; 12.0 ms (11.0 to 13.0), kept" in text
    assert 'data-copy="stepscope tune --only' in text


def test_the_reports_head_names_the_remedies_of_the_run(run: Path, tmp_path: Path) -> None:
    write_run(run, "tf32")
    text = stepscope.write_report(run, tmp_path / "r.html", cache=False).read_text()
    head = text[text.index('id="verdict"') : text.index('id="findings"')]
    assert "<span>Run with</span>tf32" in head


def test_a_comparison_names_the_side_that_was_run_with_a_remedy(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = run.parent / "other"
    shutil.copytree(run, other)
    write_run(other, "bf16")
    comparison = stepscope.compare(run, other, cache=False)
    assert ("with", "B was run with bf16") in [fact[:2] for fact in comparison_facts(comparison)]
    assert comparison_json(comparison)["b"]["remedies"][0]["id"] == "bf16"
    print_comparison(comparison, width=120)
    assert "B was run with bf16" in capsys.readouterr().out
    again = comparison_facts(stepscope.compare(run, run, cache=False))
    assert "with" not in [fact.label for fact in again]


# Promises


def test_remedies_that_show_a_promise_are_those_that_it_predicts() -> None:
    """verify cannot ask predict, so it keeps a list."""
    for text, setting in MAKES.items():
        remedy = text.partition("=")[0]
        assert remedy in CHANGES
        assert setting in map(str, settings_for_remedy(remedy))
