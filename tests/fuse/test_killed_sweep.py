"""A sweep that is killed in the middle goes on, and ends with the same answer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.ui.cli import sweep
from stepscope.ui.cli.sweep import BEST, JOURNAL, SweepJournal, SweepStart, SweepTable

SCRIPT = """\
import os
import time

import torch
from torch import nn
from torch.nn import functional

class Batches:
    def __iter__(self):
        for _ in range(5):
            time.sleep(float(os.environ.get("EACH_BATCH_S", "0")))
            x = torch.randn(8, 6, 4)
            yield x, x.sum((1, 2))[:, None]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.GRU(4, 8, 2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.steps(x)[0][:, -1])

def loss(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])

def build(config):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    return model, optimizer, Batches(), loss
"""
WORDS = ["--grid", "lr=1e-1,3e-2,1e-2,3e-3,1e-3,1e-4", "--fuse", "2", "--steps", "20"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "stepscope", "sweep", "train.py", *words, "--json"]


def answer(folder: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(command(*words), cwd=folder, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def kill_when_two_have_ended(process: subprocess.Popen[bytes], journal: Path) -> None:
    until = time.monotonic() + 150
    while process.poll() is None and time.monotonic() < until:
        if journal.exists() and journal.read_bytes().count(b'"trial"') >= 2:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_sweep_ends_with_the_same_answer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    whole = answer(tmp_path, *WORDS, "--out", "whole")
    with subprocess.Popen(
        ["env", "EACH_BATCH_S=0.05", *command(*WORDS, "--out", "killed")],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        kill_when_two_have_ended(process, tmp_path / "killed" / JOURNAL)
    before = SweepJournal.read(tmp_path / "killed").ended
    assert 2 <= len(before) < len(whole["trials"])
    again = answer(tmp_path, "--resume", "killed")
    assert again["best"]["config"] == whole["best"]["config"]
    assert [one["number"] for one in again["trials"]] == [one["number"] for one in whole["trials"]]
    for ours, theirs in zip(again["trials"], whole["trials"], strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    saved, expected = (torch.load(tmp_path / name / BEST) for name in ("killed", "whole"))
    assert saved["config"] == expected["config"]
    for name, value in expected["model"].items():
        torch.testing.assert_close(saved["model"][name], value, rtol=1e-3, atol=1e-4)


def test_a_trial_is_in_the_journal_once_its_weights_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, it trains again; else nobody would have the best weights."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    start = SweepStart(script=str(script), grid={"lr": [0.1]}, steps=2, fuse=1, every=2, seed=0)
    journal = SweepJournal.create(tmp_path, start)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "_save", killed)
        with pytest.raises(KeyboardInterrupt):
            sweep.run_sweep(journal, SweepTable(2, quiet=True))
    assert SweepJournal.read(tmp_path).ended == []
    sweep.run_sweep(SweepJournal.read(tmp_path), SweepTable(2, quiet=True))
    best = SweepJournal.read(tmp_path).best()
    assert best is not None
    assert torch.load(tmp_path / BEST)["config"] == best.config
