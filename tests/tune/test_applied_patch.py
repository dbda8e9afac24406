"""`stepscope tune --apply`: what was kept is written into the file, where git can undo it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from script_files import SCRIPTS

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS["slow_loader"]


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=tester", "-c", "user.email=tester@localhost"]
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_kept_remedy_is_in_the_script_and_its_promise_in_the_record(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    path = project / "train.py"
    path.write_text(SCRIPT.text)
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "as it is")
    record = tmp_path / "record"
    options = ["--only", "loader-workers,one-thread", "--steps", "20", "--budget", "5m"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "stepscope", "tune", "--apply", "--json", *options),
            *("--out", str(tmp_path / "tune"), "--", *SCRIPT.command(path)),
        ],
        cwd=project,
        env={**os.environ, "STEPSCOPE_RECORD": str(record)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "loader-workers" in answer["kept"][0]
    assert "changed" in done.stderr
    assert "num_workers=" in git(project, "diff")
    git(project, "apply", "-R", str(tmp_path / "tune" / "tune.patch"))
    assert path.read_text() == SCRIPT.text
    recorded = "".join(file.read_text() for file in record.iterdir())
    assert "threads" in recorded
