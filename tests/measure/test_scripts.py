"""Ten scripts nobody touched, run as a user would: same losses to the bit, same exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.records.rank import ALL_PHASES

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
WINDOW = ["--wait", "4", "--warmup", "1", "--active", "2"]

# script, how it is started, ranks, steps
CASES: list[tuple[str, list[str], int, int]] = [
    ("plain", [], 1, 20),
    ("accumulation", [], 1, 18),
    ("gan", [], 1, 18),
    ("lbfgs", [], 1, 18),
    ("grad_scaler", [], 1, 20),
    ("workers", [], 1, 20),
    ("raises", [], 1, 8),
    ("ddp", TORCHRUN, 2, 18),
    ("fsdp2", TORCHRUN, 2, 18),
]


def bare(script: str, how: list[str]) -> subprocess.CompletedProcess[str]:
    """gloo aborts now and then while a job ends; such a run says nothing about the script."""
    for _ in range(3):
        done = _call([sys.executable, *how, str(SCRIPTS / f"{script}.py")])
        if "SIGABRT" not in done.stderr:
            break
    return done


def captured(
    script: str, how: list[str], out: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *how, str(SCRIPTS / f"{script}.py")]
    ours = [sys.executable, "-m", "stepscope", "run", "--out", str(out), "--no-explain"]
    return _call([*ours, *WINDOW, *options, "--", *command])


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def run_json(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


SLOW = ("accumulation", "gan", "workers")  # in `make test-slow`


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("script", "how", "ranks", "steps"),
    [
        pytest.param(*case, id=case[0], marks=pytest.mark.slow if case[0] in SLOW else ())
        for case in CASES
    ],
)
def test_script_is_captured_and_unchanged(
    tmp_path: Path, script: str, how: list[str], ranks: int, steps: int
) -> None:
    expected = bare(script, how)
    out = tmp_path / "run"
    done = captured(script, how, out)
    assert sorted(done.stdout.splitlines()) == sorted(expected.stdout.splitlines())
    assert done.returncode == expected.returncode
    run = run_json(out)
    assert run["exit_code"] == expected.returncode
    assert [rank["rank"] for rank in run["ranks"]] == list(range(ranks))
    assert {rank["world_size"] for rank in run["ranks"]} == {ranks}
    for rank in run["ranks"]:
        assert rank["problems"] == []
        assert rank["steps"] == steps
        assert "trace.json.gz" in rank["captured"]
        rows = steps_of(out / rank["folder"])
        assert [row["step"] for row in rows] == list(range(steps))
        assert [row["step"] for row in rows if row["window"]] == [4, 5, 6]
        for row in rows:
            assert sum(row.get(f"{phase}_ns", 0) for phase in ALL_PHASES) == row["wall_ns"]


def test_skipped_steps_of_a_grad_scaler_count_and_are_marked(tmp_path: Path) -> None:
    captured("grad_scaler", [], tmp_path / "run")
    rows = steps_of(tmp_path / "run" / "rank-00000")
    assert [row["step"] for row in rows if row.get("skipped")] == [5, 12]


def test_the_line_that_calls_the_optimizer_is_noted(tmp_path: Path) -> None:
    """Also where a scaler calls it."""
    captured("grad_scaler", [], tmp_path / "run")
    (line,) = json.loads((tmp_path / "run/rank-00000/rank.json").read_text())["optimizer_lines"]
    source = Path(line["file"]).read_text().splitlines()[line["line"] - 1]
    assert "scaler.step(" in source
    assert line["optimizer"] == "SGD"


def test_steps_without_an_optimizer_are_told_from_backward_passes(tmp_path: Path) -> None:
    expected = bare("no_optimizer", [])
    done = captured("no_optimizer", [], tmp_path / "run")
    assert (done.stdout, done.returncode) == (expected.stdout, 0)
    (rank,) = run_json(tmp_path / "run")["ranks"]
    assert (rank["steps"], rank["steps_end_with"]) == (20, "backward")
    assert "trace.json.gz" in rank["captured"]


@pytest.mark.parametrize("step_on", ["forward", pytest.param("dataloader", marks=pytest.mark.slow)])
def test_neither_losses_nor_evaluation_are_steps(tmp_path: Path, step_on: str) -> None:
    expected = bare("evaluates", [])
    done = captured("evaluates", [], tmp_path / "run", "--step-on", step_on)
    assert (done.stdout, done.returncode) == (expected.stdout, 0)
    (rank,) = run_json(tmp_path / "run")["ranks"]
    assert rank["steps"] == len(expected.stdout.splitlines()) == 12


def test_a_script_of_five_steps_gets_an_answer(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "plain.py"), "5"]
    ours = [sys.executable, "-m", "stepscope", "run", "--out", str(tmp_path / "run"), "--"]
    done = _call([*ours, *command])
    assert done.stdout == _call(command).stdout
    (rank,) = run_json(tmp_path / "run")["ranks"]
    assert rank["steps"] == 5
    assert "verdict" in done.stderr
    rows = steps_of(tmp_path / "run" / "rank-00000")
    assert [row["step"] for row in rows if row["window"]] == [1, 2]


def test_a_closure_of_the_optimizer_is_forward_and_backward_not_the_optimizer(
    tmp_path: Path,
) -> None:
    """As Lightning does it: the whole step runs inside optimizer.step."""
    expected = bare("closure", [])
    done = captured("closure", [], tmp_path / "run")
    assert (done.stdout, done.returncode) == (expected.stdout, 0)
    rows = [row for row in steps_of(tmp_path / "run" / "rank-00000") if not row["window"]]
    slept = [row["forward_ns"] for row in rows[1:]]
    assert min(slept) >= 20_000_000  # the closure sleeps in its forward
    assert max(row["optimizer_ns"] for row in rows[1:]) < min(slept)
