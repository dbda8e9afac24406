"""`stepscope tune` on scripts of different make: it finishes, keeps what is planted and nothing in
a healthy script, and its patch trains as the remedies that it kept did, loss for loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from script_files import SCRIPTS, TrainingScript

from stepscope.changes import APPLIED
from stepscope.records.script_facts import ScriptFacts

sys.path.append(str(Path(__file__).parents[1] / "fix"))
from injected import run_injected

pytestmark = pytest.mark.slow

_TIMEOUT_S = 900


def tuned(script: TrainingScript, folder: Path, *options: str) -> dict[str, Any]:
    """What `tune --json` prints for a copy of the script in this folder."""
    path = folder / "train.py"
    path.write_text(script.text)
    words = ["tune", "--json", "--quiet", "--out", str(folder / "tune"), *script.options, *options]
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", *words, "--", *script.command(path)],
        cwd=folder,
        env={**os.environ, "STEPSCOPE_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def ids(remedies: list[str]) -> set[str]:
    return {remedy.partition("=")[0] for remedy in remedies}


@pytest.mark.parametrize("name", SCRIPTS)
def test_tune(tmp_path: Path, name: str) -> None:
    script = SCRIPTS[name]
    answer = tuned(script, tmp_path, "--skip", "compile", "--steps", "40", "--budget", "4m")
    kept = answer["kept"]
    assert answer["trials"]
    if script.planted:
        assert ids(kept) & script.planted, answer
        assert answer["speedup"] > 1
    if name == "healthy":
        assert kept == []
        assert answer["patch"] is None
    assert (tmp_path / "train.py").read_text() == script.text, "tune changed the script"
    assert {entry.name for entry in tmp_path.iterdir()} <= {
        "train.py",
        "tune",
        "cache",
        "stepscope-record",  # where the fixture puts the track record
    }
    if kept:
        check_patch(tmp_path, script, kept, answer)


def check_patch(
    folder: Path, script: TrainingScript, kept: list[str], answer: dict[str, Any]
) -> None:
    variables: dict[str, str] = answer["variables"]
    how = {"steps": 10, "ranks": script.ranks, "variables": variables}
    injected = run_injected(folder, script.text, *kept, **how)
    if answer["patch"]:
        done = subprocess.run(
            ["patch", "-p1"], cwd=folder, input=answer["patch"], text=True, capture_output=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    proposed = {f"{name}: " for name in APPLIED}  # what nothing was tried for
    by_hand = [line for line in answer["by_hand"] if not line.startswith(tuple(proposed))]
    if not by_hand:
        patched = run_injected(folder, (folder / "train.py").read_text(), **how)
        assert patched.losses == injected.losses, answer["patch"]


def test_facts_of_a_tune_are_read_again(tmp_path: Path) -> None:
    """What the patch is made from survives the file it is kept in."""
    run = run_injected(tmp_path, SCRIPTS["plain_loop"].text, steps=3)
    assert ScriptFacts.from_json(json.loads(json.dumps(run.facts.to_json()))) == run.facts
