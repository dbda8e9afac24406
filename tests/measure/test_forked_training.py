"""Trainings in processes that a script forks, as hogwild and A3C do."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

TRAIN = """
import os, sys
import torch
from torch import nn, multiprocessing

def train(seed, steps):
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        os.write(1, f"{seed} {step} {loss.item().hex()}\\n".encode())
"""
BY_MULTIPROCESSING = """
context = multiprocessing.get_context("fork")
children = [context.Process(target=train, args=(seed, 30 + seed)) for seed in (0, 1)]
for child in children:
    child.start()
for child in children:
    child.join()
"""
BY_HAND = """
for seed in (0, 1):
    if os.fork() == 0:
        train(seed, 30 + seed)
        os._exit(0) if seed else sys.exit(0)
for _ in range(2):
    os.wait()
"""


OURS = [sys.executable, "-m", "stepscope", "run", "--no-explain", "--out"]


def run(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize("start", [BY_MULTIPROCESSING, BY_HAND], ids=["multiprocessing", "os"])
def test_children_of_a_script_that_does_not_train_are_captured(tmp_path: Path, start: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAIN + start)
    window = ["--wait", "4", "--warmup", "1", "--active", "2"]
    bare = run([sys.executable, str(path)])
    assert run([*OURS, str(tmp_path / "run"), *window, "--", sys.executable, str(path)]) == bare
    ranks = json.loads((tmp_path / "run" / "run.json").read_text())["ranks"]
    assert sorted(rank["steps"] for rank in ranks) == [30, 31]
    assert all("trace.json.gz" in rank["captured"] for rank in ranks)


def test_a_child_of_a_training_is_no_rank(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAIN + "train(0, 20)" + BY_MULTIPROCESSING)
    run([*OURS, str(tmp_path / "run"), "--", sys.executable, str(path)])
    ranks = json.loads((tmp_path / "run" / "run.json").read_text())["ranks"]
    assert [rank["steps"] for rank in ranks] == [20]
