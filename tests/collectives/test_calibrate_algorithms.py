"""stepscope calibrate --algorithms as a user meets it: real ranks, one answer, clear errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

SHORT = ["calibrate", "--algorithms", "--seconds", "0.2"]
FEW = ["--sizes", "1KiB,16KiB", "--kind", "all_reduce"]


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stepscope", *words], capture_output=True, text=True, timeout=240
    )


def test_three_ranks_give_one_answer(tmp_path: Path) -> None:
    page = tmp_path / "algorithms.html"
    done = call(*SHORT, *FEW, "--ranks", "3", "--json", "--html", str(page))
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)["laboratory"]
    assert (body["world_size"], body["checked"]) == (3, 21)
    assert [one["algorithm"] for one in body["algorithms"]][-1] == "gloo"
    assert len(body["algorithms"]) == 8
    assert [one["size_bytes"] for one in body["algorithms"][0]["sizes"]] == [1020, 16380]
    assert all(one["time_ns"] > 0 for times in body["algorithms"] for one in times["sizes"])
    assert page.exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--sizes", "1KiB,banana"], "--sizes 'banana': write 8GB"),
        (["--sizes", "1KiB"], "at least two sizes"),
        (["--sizes", "2,8"], "4 bytes to 4GiB"),
        (["--kind", "broadcast"], "has no broadcast: choose from all_reduce"),
        (["--compare", "1MB"], "choose one"),
    ],
)
def test_wrong_use_is_said_in_one_line(words: list[str], reason: str) -> None:
    from click.testing import CliRunner

    from stepscope.errors import UsageError
    from stepscope.ui.cli.calibrate import command

    result = CliRunner().invoke(command, ["--algorithms", *words])
    assert isinstance(result.exception, UsageError)
    assert reason in str(result.exception)


@pytest.mark.slow
def test_a_backend_that_is_missing_is_said() -> None:
    done = call(*SHORT, *FEW, "--ranks", "2", "--backend", "nope")
    assert done.returncode == 2
    assert "--backend nope: this torch was built without it" in done.stderr


def test_a_single_rank_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.errors import UsageError
    from stepscope.measure.calibrate.job import measure
    from stepscope.measure.calibrate.settings import CalibrationSettings

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UsageError, match="at least 2 ranks, and this is the only one"):
        measure(CalibrationSettings(algorithms=True), lambda *_: None)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_nobody_hangs(tmp_path: Path) -> None:
    words = ["--standalone", "--nproc-per-node=3", "-m", "stepscope.measure.calibrate"]
    words += ["--algorithms", "--progress", "--seconds", "300", "--size", "4096", "--size", "8192"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words, "--json", str(tmp_path / "raw")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("stepscope-progress 0.0"):
            break
    time.sleep(1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0
    reasons = [json.loads(file.read_text())["message"] for file in tmp_path.glob("raw.error-*")]
    assert any("lost rank" in reason or "another rank ended" in reason for reason in reasons)
