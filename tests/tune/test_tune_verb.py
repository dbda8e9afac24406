"""`stepscope tune` with a real, tiny training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stepscope.trace.run_folder.related_runs import JOURNAL, TRIALS
from stepscope.ui.tune.trials import MOST_TIMES

pytest.importorskip("torch")

SCRIPT = """\
import sys, time
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    loss = model(torch.ones(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.003)
print("trained to the end")
"""
STEPSCOPE = [sys.executable, "-m", "stepscope"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def tune(home: Path, *words: str, command: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*STEPSCOPE, "tune", *words, *(("--", *command) if command else ())],
        cwd=home,
        env={**os.environ, "STEPSCOPE_RECORD": str(home / "record")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(steps: int = 4000) -> tuple[str, ...]:
    return (sys.executable, "train.py", str(steps))


def answer(process: subprocess.Popen[str], code: int = 0) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    result: dict[str, Any] = json.loads(out)
    return result


def left_running(folder: Path) -> list[str]:
    """Processes that carry the folder's name in their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (place / "environ").read_bytes():
                found.append((place / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return found


def wait_for_trial(
    folder: Path, number: int, process: subprocess.Popen[str], since: float = 0.0
) -> None:
    """Until the trial has begun, after `since`."""
    until = time.monotonic() + 240
    while time.monotonic() < until and process.poll() is None:
        for trial in (folder / TRIALS).glob(f"{number:04d}-*/output.txt"):
            if trial.stat().st_mtime >= since:
                return
        time.sleep(0.05)
    raise AssertionError(f"no trial {number}: {process.communicate()[1]}")


@pytest.fixture(scope="module")
def finished(home: Path) -> tuple[Path, dict[str, Any]]:
    folder = home / "whole"
    words = ("--out", str(folder), "--only", "fused-optimizer", "--steps", "20", "--json")
    return folder, answer(tune(home, *words, command=train()))


def test_the_answer_is_json_and_in_the_folder(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, result = finished
    assert result == json.loads((folder / "tune.json").read_text())
    assert result["schema"] == 1
    assert result["status"] == "finished"
    assert result["baseline_ms"] > 3
    assert [row["remedies"] for row in result["trials"]] == [["fused-optimizer"]]
    assert result["control"] == "its losses are bit-identical from run to run"
    row = result["trials"][0]
    assert row["low_ms"] <= row["measured_ms"] <= row["high_ms"]
    assert row["parity"] in ("bit-identical", "rounding")
    assert row["peak_bytes"] > 0
    assert all((folder / run / "run.json").is_file() for run in row["runs"])


def test_a_sleep_is_nothing_that_an_optimizer_can_help(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    _, result = finished
    assert result["kept"] == []
    assert result["patch"] is None
    sure = "none of the tried changes gains 2% or more"
    open_words = "none is clearly faster: starts of the same command differ by "
    assert result["verdict"].startswith(sure if result["starts_differ"] is None else open_words)


def test_every_trial_is_a_run_folder_that_compare_reads(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = finished
    trials = sorted(str(path) for path in (folder / TRIALS).iterdir())
    words = [*STEPSCOPE, "compare", "--json", *trials[:2]]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["a_ms"] > 3


def test_trials_end_themselves_after_the_steps(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    for trial in (folder / TRIALS).iterdir():
        assert "trained to the end" not in (trial / "output.txt").read_text()
        assert json.loads((trial / "rank-00000/rank.json").read_text())["steps"] == 20 * MOST_TIMES
    assert not left_running(folder)


def test_resumed_when_finished_it_answers_again_without_a_trial(
    home: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    folder, result = finished
    before = (folder / JOURNAL).read_bytes()
    assert answer(tune(home, "--resume", str(folder), "--json")) == result
    assert (folder / JOURNAL).read_bytes() == before


@pytest.mark.parametrize(
    ("words", "command", "message"),
    [
        (("--steps", "30"), (), "--steps cannot change"),
        ((), ("python", "other.py"), "it tunes another command"),
    ],
)
def test_another_tune_is_not_resumed(
    home: Path,
    finished: tuple[Path, dict[str, Any]],
    words: tuple[str, ...],
    command: tuple[str, ...],
    message: str,
) -> None:
    process = tune(home, "--resume", str(finished[0]), *words, command=command)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "nonsense"), "there is no change 'nonsense'"),
        (("--only", "bf16", "--skip", "bf16"), "both --only and --skip"),
        (("--budget", "soon"), "write 10m, 90s or 1h"),
        (("--memory-limit", "much"), "write 8GB"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(
    home: Path, words: tuple[str, ...], message: str
) -> None:
    process = tune(home, *words, command=train())
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert message in err


def test_a_command_that_fails_is_not_tuned(home: Path) -> None:
    process = tune(home, "--out", str(home / "bad"), command=(sys.executable, "-c", "1/0"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "exit code 1" in err
    assert "ZeroDivisionError" in err


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_stopped_in_a_trial_it_leaves_no_process_and_can_go_on(
    home: Path, number: signal.Signals, code: int
) -> None:
    folder = home / number.name
    options = ("--only", "fused-optimizer", "--steps", "20", "--budget", "1h", "--json")
    process = tune(home, "--out", str(folder), *options, command=train())
    wait_for_trial(folder, 2, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    until = time.monotonic() + 10
    while left_running(folder) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left_running(folder)
    if number != signal.SIGKILL:
        assert json.loads(out)["status"] == "interrupted"
        assert json.loads((folder / "tune.json").read_text())["status"] == "interrupted"
        assert len(list((folder / TRIALS).iterdir())) == 1
    began = time.time()
    again = tune(home, "--resume", str(folder), "--json")
    wait_for_trial(folder, 2, again, began)
    again.send_signal(signal.SIGINT)
    assert answer(again, 130)["baseline_ms"] > 3
    lines = (folder / JOURNAL).read_text().splitlines()
    numbers = [json.loads(line).get("number") for line in lines]
    assert numbers[2:4] in ([1], [1, 2])
