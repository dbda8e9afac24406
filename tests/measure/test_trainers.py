"""Trainers that own the loop, run for real: same losses to the bit, every step, a readable run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.measure.watch import _Watching

SCRIPTS = Path(__file__).parent / "scripts" / "trainers"
STEPS = 18
WINDOW = ["--wait", "4", "--warmup", "1", "--active", "2"]
# With --cpu the launcher starts one process, whatever number it is given; this one starts gloo's.
LAUNCH = [
    *("-m", "accelerate.commands.launch", "--mixed_precision=no", "--dynamo_backend=no"),
    *("--multi_gpu", "--num_processes=2", "--num_machines=1", "--main_process_port=0"),
]


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed in this Python")


def call(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done


def losses(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Sorted, because ranks write as they come."""
    return sorted(line for line in done.stdout.splitlines() if "0x" in line)


def explained(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call("-m", "stepscope", "explain", "--json", folder).stdout)
    return found


def check(folder: Path, ranks: int) -> None:
    """Every rank was captured whole, and the folder can be explained."""
    for rank in range(ranks):
        home = folder / f"rank-{rank:05d}"
        told = json.loads((home / "rank.json").read_text())
        assert (told["world_size"], told["steps"], told["status"]) == (ranks, STEPS, "finished")
        assert told["problems"] == []
        rows = [json.loads(line) for line in (home / "steps.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(STEPS))
        assert [row["step"] for row in rows if row["window"]] == [4, 5, 6]
        assert all(row["backward_ns"] and row["optimizer_ns"] for row in rows[1:])
    found = explained(folder)
    assert len(found["ranks"]) == ranks
    assert found["ranks"][0]["step_ms"]["truth"]


def run(out: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    ours = ["-m", "stepscope", "run", "--no-explain", "--out", str(out), *WINDOW]
    done = call(*ours, "--", sys.executable, *command)
    assert json.loads((out / "run.json").read_text())["exit_code"] == 0
    return done


@pytest.mark.slow
@needs("accelerate")
def test_accelerate_launch_is_captured_and_unchanged(tmp_path: Path) -> None:
    command = [*LAUNCH, str(SCRIPTS / "with_accelerate.py")]
    bare, captured = call(*command), run(tmp_path / "run", *command)
    assert losses(captured) == losses(bare)
    assert len(losses(bare)) == STEPS * 2
    check(tmp_path / "run", 2)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param("with_transformers.py", marks=[needs("transformers"), needs("accelerate")]),
        pytest.param("with_lightning.py", marks=needs("lightning")),
    ],
)
def test_a_trainer_is_captured_and_unchanged_with_its_callback_and_from_outside(
    tmp_path: Path, script: str
) -> None:
    bare = call(SCRIPTS / script)
    watched = call(SCRIPTS / script, tmp_path / "watched")
    captured = run(tmp_path / "run", SCRIPTS / script)
    assert losses(watched) == losses(captured) == losses(bare)
    assert len(losses(bare)) == STEPS * 2
    check(tmp_path / "watched", 1)
    check(tmp_path / "run", 1)


def test_a_folder_that_cannot_be_made_does_not_stop_a_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    watching = _Watching(tmp_path / "file" / "run", {})
    watching.begin()
    watching.step()
    watching.end()
    assert "nothing is captured" in capsys.readouterr().err
