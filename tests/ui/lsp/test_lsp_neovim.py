"""Neovim itself, headless, against a real server process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from editor_client import MADE, REAL
from test_lsp_server import SCRIPT, write

HERE = Path(__file__).parent
needs_neovim = pytest.mark.skipif(
    shutil.which("nvim") is None, reason="Neovim is not installed (apt install neovim)"
)


def drive(script: Path, server: list[str], folder: Path) -> dict[str, Any]:
    answer = folder / "answer.json"
    words = {"SERVER": "\n".join(server), "SCRIPT": str(script), "ANSWER": str(answer)}
    done = subprocess.run(
        ["nvim", "--headless", "-u", "NONE", "-i", "NONE", "-n", "-S", str(HERE / "neovim.lua")],
        env={**os.environ, **words, "HOME": str(folder), "XDG_STATE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert answer.exists(), done.stderr
    steps: dict[str, Any] = json.loads(answer.read_text())
    assert "failed" not in steps, steps["failed"]
    return steps


@pytest.mark.slow
@needs_neovim
def test_neovim_shows_follows_patches_undoes_and_saves(tmp_path: Path) -> None:
    steps = drive(write(tmp_path), MADE, tmp_path)
    assert set(steps["measured"]) == {"5", "6"}
    assert steps["measured"]["5"].startswith("3.50 ms")
    assert set(steps["moved"]) == {"6", "7"}
    assert steps["undone"] == steps["measured"]
    assert steps["patched"] == SCRIPT.replace("lr=1e-3)", "lr=1e-3, fused=True)").rstrip("\n")
    assert steps["stale"]["5"].startswith("was 3.50 ms")
    assert steps["restored"]
    assert steps["saved"]["5"].startswith("7.25 ms")
    assert steps["diagnostics"] == 1


@needs_neovim
@pytest.mark.slow
def test_neovim_on_a_real_training(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = Path(shutil.copy(HERE / "scripts" / "perceptron.py", tmp_path)).resolve()
    costly = [n for n, line in enumerate(script.read_text().split("\n")) if "# costs" in line]
    steps = drive(script, REAL, tmp_path)
    assert {str(number) for number in costly} <= set(steps["measured"])
    assert {str(number + 1) for number in costly} <= set(steps["moved"])
    assert "lr=1e-3, fused=True)" in steps["patched"]
    assert steps["restored"]
    assert not any(words.startswith("was") for words in steps["saved"].values())
