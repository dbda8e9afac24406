"""Python processes that never need torch, and scripts with modules named like Python's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stepscope.measure.settings import Settings
from stepscope.ui.jobs.environment import capture_variables

if TYPE_CHECKING:
    from pathlib import Path

SHOWN = "import sys; print(*sorted(sys.modules))"
STEPS = """
import torch

weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(4):
    optimizer.zero_grad()
    (weight * 2).sum().backward()
    optimizer.step()
"""


def run(folder: Path, *command: str, plain: bool = False) -> str:
    """What the command prints, with a run folder beside it."""
    (folder / "run \u00e4").mkdir(exist_ok=True)
    settings = Settings(folder=str(folder / "run \u00e4"), wait=1, warmup=1, active=1)
    variables = capture_variables(settings, os.environ)
    if plain:
        variables |= settings.to_environment(plain=True)
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_nothing_is_imported_before_the_scripts_folder_is_on_the_path(tmp_path: Path) -> None:
    bare = subprocess.run(
        [sys.executable, "-c", SHOWN], capture_output=True, text=True, check=True
    ).stdout.split()
    captured = run(tmp_path, "-c", SHOWN).split()
    assert {*captured} - {*bare} == {"sitecustomize", "_json"}


def test_a_script_may_have_a_module_named_like_pythons_own(tmp_path: Path) -> None:
    (tmp_path / "token.py").write_text("def words(text): return text.split()\n")
    (tmp_path / "prep.py").write_text("from token import words; print(words('a b'))\n")
    assert run(tmp_path, "prep.py") == "['a', 'b']\n"


@pytest.mark.parametrize("begins", ["import importlib.util as u; u.find_spec('torch')", STEPS])
def test_a_script_gets_its_own_module_after_capture_began(tmp_path: Path, begins: str) -> None:
    """Capture loads Python's modules of these names, torch alone does not."""
    for name in ("base64", "resource") if begins != STEPS else ("resource", "hmac"):
        (tmp_path / f"{name}.py").write_text("OWN = True\n")
        script = tmp_path / "train.py"
        script.write_text(f"{begins}\nimport {name}\nprint({name}.OWN)\n")
        assert run(tmp_path, "train.py") == "True\n"


@pytest.mark.parametrize("plain", [False, True])
def test_processes_without_torch_are_noted(tmp_path: Path, plain: bool) -> None:
    run(tmp_path, "-c", "0", '"\u00fc\u20ac\U0001f40d\\', plain=plain)
    (file,) = (tmp_path / "run \u00e4" / "hosts").iterdir()
    (line,) = file.read_text().splitlines()
    noted = json.loads(line)
    assert noted["event"] == "started"
    assert noted["host"] == os.uname().nodename
    assert noted["command"].endswith('-c 0 "\u00fc\u20ac\U0001f40d\\')


COUNTED = """
import time
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

class Count(TorchDispatchMode):
    number = 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        Count.number += 1
        return function(*args, **(kwargs or {}))

weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
with Count():
    for step in range(12):
        optimizer.zero_grad()
        (weight * 2).sum().backward()
        optimizer.step()
        if step == 2:
            time.time = time.time_ns = time.monotonic = None
print(Count.number)
"""


def test_a_scripts_own_mode_and_clock_meet_nothing_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(COUNTED)
    bare = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True)
    assert run(tmp_path, "train.py").split() == bare.stdout.decode().split()
    rank = tmp_path / "run \u00e4" / "rank-00000"
    facts = json.loads((rank / "rank.json").read_text())
    assert facts["steps"] == 12
    assert (rank / "trace.json.gz").exists(), facts


def test_capture_takes_no_module_of_the_script_for_pythons_own(tmp_path: Path) -> None:
    """torch alone needs none of these."""
    pytest.importorskip("torch")
    for name in ("resource", "stepscope"):
        (tmp_path / f"{name}.py").write_text("print(__name__, 'ran'); 1 / 0\n")
    (tmp_path / "train.py").write_text(STEPS)
    assert run(tmp_path, "train.py") == ""
    rank = json.loads((tmp_path / "run \u00e4" / "rank-00000" / "rank.json").read_text())
    assert rank["steps"] == 4
