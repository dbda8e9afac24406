"""`stepscope sweep` with a real script: the answer, its files, a kill, bad calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stepscope.fix.fuse import grid
from stepscope.ui.cli.sweep import JOURNAL, parse_axes

SCRIPT = """\
import torch
from torch import nn
from torch.nn import functional

def loss(model, batch):
    x, y = batch
    return functional.mse_loss(model(x), y)

def build(config):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return model, optimizer, [(x, x.sum(1, keepdim=True))], loss

if __name__ == "__main__":
    raise SystemExit("a sweep must not run this")
"""


def stepscope(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepscope", "sweep", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=170)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_grid_is_swept_and_a_cut_sweep_goes_on(script: Path) -> None:
    folder = script.parent
    words = ["train.py", "--grid", "lr=1e-1,1e-3", "flag=true,2", "--fuse", "3", "--steps", "8"]
    done = stepscope(folder, *words, "--every", "4", "--out", "swept", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["settings"] == len(answer["trials"]) == 4
    assert answer["best"]["config"]["lr"] == 0.1
    assert all(len(trial["losses"]) == 2 for trial in answer["trials"])
    best = torch.load(folder / "swept/best.pt")
    assert set(best["model"]) == {"weight", "bias"}

    journal = folder / "swept" / JOURNAL
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:2]) + lines[2][:20])
    again = stepscope(folder, "train.py", "--resume", "swept", "--json")
    assert again.returncode == 0, again.stderr
    rows = {trial["number"]: trial["loss"] for trial in json.loads(again.stdout)["trials"]}
    assert rows == pytest.approx({trial["number"]: trial["loss"] for trial in answer["trials"]})


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["train.py"], 2, "name the settings to try: --grid"),
        (["none.py", "--grid", "lr=1"], 2, "does not exist"),
        (["train.py", "--grid", "lr"], 2, "NAME=VALUE,VALUE"),
        (["empty.py", "--grid", "lr=1"], 2, "no function build(config)"),
        (["raises.py", "--grid", "lr=1"], 4, "raises.py in line 3: ValueError: no data"),
        (["train.py", "--resume", "."], 3, JOURNAL),
    ],
)
def test_bad_calls(script: Path, words: list[str], code: int, message: str) -> None:
    (script.parent / "empty.py").write_text("")
    (script.parent / "raises.py").write_text(
        "def build(config):\n    # nothing yet\n    raise ValueError('no data')\n"
    )
    done = stepscope(script.parent, *words)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_grid_is_every_value_with_every_other() -> None:
    axes = parse_axes(["lr=1e-3,2", "kind=adam", "flag=true,False"])
    assert axes == {"lr": (0.001, 2), "kind": ("adam",), "flag": (True, False)}
    assert len(grid(**axes)) == 4
