"""`stepscope bench` as a process, on workloads of a package that these tests make."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PACKAGE = """
import time

import torch
from stepscope.bench.workload import Target, TrainingWorkload


def build(config, place):
    model = place.put(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    inputs = torch.randn(config.batch, 16, generator=place.generator())
    answers = inputs.sum(1, keepdim=True)

    def step(number):
        if number >= config.fails_at:
            raise ValueError(f"no data for step {number}")
        time.sleep(config.sleep_s)
        loss = torch.nn.functional.mse_loss(model(inputs), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def workload(name, **settings):
    usual = {"batch": 32, "lr": 0.1, "sleep_s": 0.0, "fails_at": 10**6}
    return TrainingWorkload(
        name=name, task="regression", source="made up", samples="rows",
        sizes={"tiny": {**usual, **settings}},
        targets={"tiny": Target(loss=1.0, steps=40)}, build=build,
    )


QUICK = workload("quick")
RAISES = workload("raises", fails_at=12)
SLEEPS = workload("sleeps", sleep_s=0.5)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder that holds an installed package with three workloads."""
    (tmp_path / "made_workloads.py").write_text(PACKAGE)
    info = tmp_path / "made_workloads-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-workloads\nVersion: 1\n")
    names = "".join(f"{name} = made_workloads:{name.upper()}\n" for name in NAMES)
    (info / "entry_points.txt").write_text(f"[stepscope.workloads]\n{names}")
    return tmp_path


NAMES = ("quick", "raises", "sleeps")


def start(home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "stepscope", "bench", *words],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def test_a_workload_that_raises_is_said_and_the_others_go_on(home: Path) -> None:
    words = ("raises", "quick", "--steps=24", "--json", "--csv=table.csv", "--out=runs")
    code, out, err = finish(start(home, *words))
    assert code == 1, err
    results = json.loads(out)
    raises, quick = results["workloads"]
    assert (raises["status"], raises["why"]) == ("failed", "ValueError: no data for step 12")
    assert quick["status"] == "measured"
    assert quick["samples_per_s"] == pytest.approx(32e3 / quick["step_ms"])
    assert quick["low"] <= quick["samples_per_s"]
    # On a busy machine steps differ so much that nothing bounds the pace from above.
    assert quick["high"] is None or quick["samples_per_s"] <= quick["high"]
    assert sum(quick["budget_ms"].values()) == pytest.approx(quick["step_ms"])
    assert quick["loss_last"] < quick["loss_first"]
    assert quick["peak_bytes"]
    assert quick["verdict"]
    assert quick["flops"] == 2 * 32 * 16 * 2
    assert "these are not the suite's own settings: steps=24" in results["broken_rules"]
    assert json.loads((home / "runs/bench.json").read_text()) == results
    with (home / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["raises", "quick"]
    assert float(rows[1]["settings.batch"]) == 32
    assert rows[0]["step_ms"] == ""


@pytest.mark.slow
def test_ctrl_c_prints_what_is_known(home: Path) -> None:
    process = start(home, "quick", "sleeps", "--json", "--out=runs")
    until = time.monotonic() + 120
    while not list((home / "runs").glob("sleeps-1/rank-*/steps.jsonl")):
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    code, out, _ = finish(process)
    assert code == 130
    quick, sleeps = json.loads(out)["workloads"]
    assert quick["status"] == "measured"
    assert (sleeps["status"], sleeps["why"]) == ("not run", "interrupted")


@pytest.mark.slow
def test_a_saved_file_says_whether_it_was_run_again(home: Path) -> None:
    code, out, err = finish(start(home, "quick", "--runs=2", "--steps=24", "--save=base.json"))
    assert code == 0, err
    assert "only 2 runs of each workload" in out
    saved = json.loads((home / "base.json").read_text())
    assert saved["reruns"] == []
    code, _, err = finish(start(home, "--again=base.json", "--quiet"))
    assert code == 0, err
    assert "base.json: run again 1 time" in err
    again = json.loads((home / "base.json").read_text())
    assert len(again.pop("reruns")) == 1
    assert again == {name: value for name, value in saved.items() if name != "reruns"}


@pytest.mark.slow
def test_two_ranks_and_two_sets_of_remedies_take_turns(home: Path) -> None:
    words = ("quick", "--ranks=2", "--steps=24", "--with=none", "--with=set-to-none", "--json")
    code, out, err = finish(start(home, *words, "--out=runs"))
    assert code == 0, err
    plain, changed = json.loads(out)["workloads"]
    assert plain["ranks"] == 2
    assert plain["remedies"] == []
    assert plain["samples_per_s"] == pytest.approx(64e3 / plain["step_ms"])
    assert changed["remedies"] == ["set-to-none"]
    assert changed["speedup"] is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("quik",), "there is no workload quik: did you mean quick?"),
        (("quick", "--size=tinny"), "did you mean tiny?"),
        (("quick", "--set=batsh=4"), "did you mean batch"),
        (("quick", "--set=batch"), "write NAME=VALUE"),
        (("quick", "--with=bf17"), "did you mean bf16?"),
        (("quick", "--save=nowhere/base.json"), "its folder does not exist"),
        (("quick", "--again=base.json"), "leave out everything else"),
    ],
)
@pytest.mark.slow
def test_bad_input_is_refused_before_anything_runs(
    home: Path, words: tuple[str, ...], message: str
) -> None:
    code, out, err = finish(start(home, *words))
    assert code == 2
    assert out == ""
    assert message in err
    assert not (home / "stepscope-runs").exists()


def test_the_list_has_the_workloads_of_other_packages(home: Path) -> None:
    code, out, err = finish(start(home, "quick", "gpt2", "--list", "--json"))
    assert code == 0, err
    quick, gpt2 = json.loads(out)["workloads"]
    assert quick["sizes"]["tiny"]["settings"]["batch"] == 32
    assert (gpt2["name"], gpt2["task"]) == ("gpt2", "language model")
