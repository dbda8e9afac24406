"""Ten scripts nobody touched, run as a user would: same losses to the bit, same exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    return _call([sys.executable, *how, str(SCRIPTS / f"{script}.py")])


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


@pytest.mark.parametrize(("script", "how", "ranks", "steps"), CASES, ids=[c[0] for c in CASES])
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
            phases = ("data", "forward", "backward", "optimizer", "other")
            assert sum(row[f"{phase}_ns"] for phase in phases) == row["wall_ns"]


def test_skipped_steps_of_a_grad_scaler_count_and_are_marked(tmp_path: Path) -> None:
    captured("grad_scaler", [], tmp_path / "run")
    rows = steps_of(tmp_path / "run" / "rank-00000")
    assert [row["step"] for row in rows if row.get("skipped")] == [5, 12]


def test_without_an_optimizer_it_says_what_to_do(tmp_path: Path) -> None:
    expected = bare("no_optimizer", [])
    done = captured("no_optimizer", [], tmp_path / "a")
    assert (done.stdout, done.returncode) == (expected.stdout, 0)
    assert "--step-on dataloader" in done.stderr
    assert run_json(tmp_path / "a")["ranks"] == []
    done = captured("no_optimizer", [], tmp_path / "b", "--step-on", "dataloader")
    assert done.stdout == expected.stdout
    assert run_json(tmp_path / "b")["ranks"][0]["steps"] >= 20
