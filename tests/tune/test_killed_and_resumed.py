"""A tune that is killed again and again and resumed: the same answer, nothing left behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from script_files import SCRIPTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"),
]

SCRIPT = SCRIPTS["slow_loader"]
OPTIONS = ["--only", "loader-workers,flush-denormal", "--steps", "20", "--budget", "5m"]
KILLS = 10
_LONGEST_S = 12.0
_TIMEOUT_S = 600
_ENDED_S = 20.0


class Tune:
    """One tune in a folder, started as often as it takes."""

    def __init__(self, folder: Path) -> None:
        self.home, self.folder = folder, folder / "tune"
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT.text)

    def start(self) -> subprocess.Popen[str]:
        """Go on, or begin if it was killed before it wrote a line."""
        options = ["--resume", str(self.folder)]
        if not self.journal():
            shutil.rmtree(self.folder, ignore_errors=True)
            options = ["--out", str(self.folder), *OPTIONS]
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "stepscope", "tune", "--json", *options),
                *("--", *SCRIPT.command(self.script)),
            ],
            cwd=self.home,
            env={**os.environ, "STEPSCOPE_CACHE": str(self.home / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> dict[str, Any]:
        process = self.start()
        out, err = process.communicate(timeout=_TIMEOUT_S)
        assert process.returncode == 0, err
        answer: dict[str, Any] = json.loads(out)
        return answer

    def journal(self) -> list[str]:
        """The whole lines."""
        try:
            return (self.folder / "journal.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []

    def processes(self) -> list[str]:
        """The command lines of all processes with this folder's name in their environment."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if str(self.folder).encode() in (place / "environ").read_bytes():
                    found.append((place / "cmdline").read_bytes().decode())
            except OSError:
                continue
        return found

    def wait_for_silence(self) -> list[str]:
        until = time.monotonic() + _ENDED_S
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        return left

    def trials_in_journal(self) -> set[str]:
        lines = [json.loads(line) for line in self.journal()]
        return {line["folder"] for line in lines if line["kind"] == "trial"}


def test_killed_at_ten_moments(tmp_path: Path) -> None:
    numbers = random.Random(7)
    (tmp_path / "killed").mkdir()
    tune = Tune(tmp_path / "killed")
    for number in range(KILLS):
        before = [line for line in tune.journal() if line.endswith("\n")]
        process = tune.start()
        how = signal.SIGKILL if number % 2 == 0 else signal.SIGTERM
        try:
            process.communicate(timeout=numbers.uniform(1.0, _LONGEST_S))
        except subprocess.TimeoutExpired:
            process.send_signal(how)
            process.communicate(timeout=_TIMEOUT_S)
            assert process.returncode == (-how if how == signal.SIGKILL else 128 + how)
        assert tune.wait_for_silence() == [], f"processes are left after {how.name}"
        assert tune.journal()[: len(before)] == before, "what was finished is lost"
    answer = tune.finish()
    check_answer(tune, answer)

    (tmp_path / "calm").mkdir()
    calm = Tune(tmp_path / "calm").finish()
    assert ids(calm) == ids(answer) == {"loader-workers"}


def check_answer(tune: Tune, answer: dict[str, Any]) -> None:
    assert tune.processes() == []
    assert {place.name for place in (tune.folder / "trials").iterdir()} == tune.trials_in_journal()
    half_written = [*tune.folder.rglob("*.tmp"), *tune.folder.rglob(".*@*")]
    assert half_written == []
    assert json.loads((tune.folder / "tune.json").read_text()) == answer
    lines = tune.journal()
    assert tune.finish() == answer, "the same trials lead to another answer"
    assert tune.journal() == lines, "a finished tune has nothing left to run"


def ids(answer: dict[str, Any]) -> set[str]:
    return {remedy.partition("=")[0] for remedy in answer["kept"]}
