"""The library models' scripts, and how their results are gathered into a table."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import library_hand
import library_results
import library_table
import library_tune
import library_turn
from library_models import MODELS

FOLDER = Path(library_results.__file__).parent / "library_models"


def answer(baseline: float, best: float, *kept: str, status: str = "finished") -> dict:
    """As tune.json has it; a promise of half the baseline for each single remedy."""
    trials = [
        {
            "remedies": [name],
            "predicted_ms": baseline / 2,
            "measured_ms": best,
            "parity": "rounding",
        }
        for name in kept
    ]
    if len(kept) > 1:
        trials.append({"remedies": list(kept), "parity": "rounding", "measured_ms": best})
    return {
        "baseline_ms": baseline,
        "best_ms": best,
        "kept": list(kept),
        "trials": trials,
        "control": "its losses repeat to the bit",
        "status": status,
    }


def tuned(*args: object, **options: str) -> dict:
    return {"answer": answer(*args, **options), "promised_ms": None, "cut": False, "failure": None}


def by_hand(**steps: float) -> dict:
    return {"combinations": {name: {"ms": ms} for name, ms in steps.items()}, "finished": True}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_a_plain_script_of_one_shape(name: str) -> None:
    text = library_results.script(name).read_text()
    functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert {"build", "make_batches", "loss_of", "main"} <= functions
    assert "stepscope" not in text
    assert len(text.splitlines()) <= 80


def test_every_script_is_listed() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == {*MODELS, "__init__"}


def test_a_model_trains_as_a_user_starts_it() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [
            sys.executable,
            FOLDER / "llama.py",
            "--device",
            "cpu",
            "--tiny",
            "--batch",
            "2",
            "--steps",
            "2",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 0: loss ")


def test_a_failure_or_a_part_never_replaces_a_whole_result(tmp_path: Path) -> None:
    whole, failed, part = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    library_results.save(whole, "llama", by_hand(fp32=10.0))
    library_results.save(failed, "llama", {"failure": "exit code 1"})
    library_results.save(part, "llama", by_hand(fp32=11.0) | {"finished": False})
    library_results.save(part, "swin", by_hand(fp32=12.0))
    assert library_results.merged([whole, failed, part]) == {
        "llama": by_hand(fp32=10.0),
        "swin": by_hand(fp32=12.0),
    }
    library_results.save(failed, "llama", by_hand(fp32=9.0))
    assert library_results.merged([whole, failed])["llama"] == by_hand(fp32=9.0)


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(SystemExit, match="no such model: lama"):
        library_results.chosen("llama,lama")


def test_the_best_by_hand_is_the_fastest_that_did_not_fail() -> None:
    result = by_hand(fp32=100.0, bf16=40.0)
    result["combinations"]["bf16+fused"] = {"failure": "OutOfMemoryError"}
    assert library_hand.best(result) == ("bf16", 40.0)
    assert library_hand.best({"combinations": {}}) is None


def test_means_are_geometric_and_misses_are_named() -> None:
    results = {
        "llama": tuned(100.0, 25.0, "bf16", "compile"),
        "swin": tuned(50.0, 50.0),
        "sage": {"answer": None, "failure": "exit code 1", "cut": False},
    }
    answers = [result["answer"] for result in results.values() if result["answer"]]
    words = library_table.means(
        answers, results, {"llama": by_hand(fp32=100.0, bf16=25.0), "swin": by_hand(fp32=40.0)}
    )
    assert "over 2 models: 2.00x" in words
    assert "100% off on average, 100% at worst (2 promises)" in words
    assert "By hand, 2 models: 2.00x" in words
    assert "1 of 2 within 3% or faster; slower: swin" in words


def test_the_table_has_every_model_that_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    library_table.print_tables(
        {"llama": tuned(100.0, 25.0, "bf16"), "sage": {"answer": None, "failure": "no | way"}},
        {"swin": by_hand(fp32=40.0)},
    )
    rows = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")
        for line in capsys.readouterr().out.split("\n\n")[0].splitlines()
    }
    assert rows["llama"][1:8] == [
        "100.0", "50.0", "25.0", "4.00x", "bf16", "rounding", "its losses repeat to the bit",
    ]  # fmt: skip
    assert rows["sage"][5] == "failed: no / way"
    assert rows["swin"][5] == "not tuned"
    assert rows["swin"][-3:-1] == ["40.0", "fp32"]


def test_a_tune_that_ended_is_not_repeated() -> None:
    options = library_tune._parser().parse_args([])
    going_on = library_tune._parser().parse_args(["--go-on"])
    early = tuned(10.0, 9.0, "bf16", status="out of time")
    assert library_tune._is_done(early, options)
    assert not library_tune._is_done(early, going_on)
    untried = tuned(10.0, 9.0, "bf16")
    untried["answer"]["left_out"] = [{"remedy": "tf32", "why": "the budget was spent before it"}]
    assert library_tune._is_done(untried, options)
    assert not library_tune._is_done(untried, going_on)
    assert library_tune._is_done(tuned(10.0, 9.0, "bf16"), going_on)
    assert not library_tune._is_done(tuned(10.0, 9.0, "bf16") | {"cut": True}, options)
    assert not library_tune._is_done({"answer": None, "cut": False}, options)
    assert not library_tune._is_done(None, options)


def test_a_tune_with_a_journal_is_resumed(tmp_path: Path) -> None:
    options = library_tune._parser().parse_args(["--device", "cpu", "--tiny"])
    begun = library_tune._command("swin", tmp_path / "swin", 90.0, options, ["--only", "bf16"])
    assert begun[begun.index("tune") :] == [
        "tune", "--json", "--budget", "90s", "--steps", "40", "--out", str(tmp_path / "swin"),
        "--only", "bf16", "--", sys.executable, str(FOLDER / "swin.py"), "--tiny", "--device",
        "cpu",
    ]  # fmt: skip
    options.at_once = 2
    in_turns = library_tune._command("swin", tmp_path / "swin", 90.0, options, [])
    assert Path(in_turns[in_turns.index("--") + 2]).name == "library_turn.py"
    assert in_turns[in_turns.index("--") + 4] == str(FOLDER / "swin.py")
    (tmp_path / "swin").mkdir()
    (tmp_path / "swin/journal.jsonl").touch()
    resumed = library_tune._command("swin", tmp_path / "swin", 90.0, options, ["--only", "bf16"])
    assert resumed[resumed.index("--budget") :][:5] == [
        "--budget", "90s", "--resume", str(tmp_path / "swin"), "--",
    ]  # fmt: skip


def test_of_trainings_that_share_a_folder_one_at_a_time_is_timed(tmp_path: Path) -> None:
    """From its sixth step on each has the device alone; the other is stopped meanwhile."""
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, time\n"
        "import torch\n"
        "torch.manual_seed(0)\n"
        "weight = torch.nn.Parameter(torch.zeros(1))\n"
        "optimizer = torch.optim.SGD([weight])\n"
        "for step in range(12):\n"
        "    optimizer.step()\n"
        "    if step == 6: began = time.monotonic()\n"
        "    time.sleep(0.05)\n"
        "print(began, time.monotonic(), sys.argv[1])\n"
    )
    turn = Path(library_tune.__file__).with_name("library_turn.py")
    folder = tmp_path / "turns"
    with library_turn.Turns(folder).kept_going():
        both = [
            subprocess.Popen([sys.executable, turn, folder, script, word], stdout=-1, text=True)
            for word in ("a", "b")
        ]
        lines = [child.communicate(timeout=120)[0].split() for child in both]
    assert [line[2] for line in lines] == ["a", "b"]
    first, second = sorted((float(line[0]), float(line[1])) for line in lines)
    assert first[1] <= second[0]


def test_a_command_past_its_limit_is_asked_to_end_as_by_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library_tune, "_AFTER_BUDGET_S", 0)
    answers = """trap 'kill $!; echo "{\\"baseline_ms\\": 1}"; exit 130' INT; sleep 60 & wait"""
    code, cut, output = library_tune._run(["sh", "-c", answers], 2.0)
    assert (code, cut) == (130, True)
    assert library_tune._read_answer(Path("nowhere"), output.stdout) == {"baseline_ms": 1}
    code, cut, _ = library_tune._run([sys.executable, "-c", ""], 30.0)
    assert (code, cut) == (0, False)


def test_half_an_answer_is_none(tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text('{"schema": 1, "baseline')
    assert library_tune._read_answer(tmp_path, "") is None
    assert library_tune._read_answer(tmp_path, json.dumps({"baseline_ms": None})) is None


def test_what_is_carried_comes_from_the_project_file() -> None:
    import carry

    names = {requirement.split(">")[0] for requirement in carry.dependencies(numpy=False)}
    assert "msgspec" in names
    assert "numpy" not in names
    assert any(name.startswith("numpy") for name in carry.dependencies(numpy=True))
