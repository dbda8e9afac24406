"""The language server stands alone: without its folders, its verb and its line, all else works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import house

OWN = ("stepscope.ui.lsp", "stepscope.ui.editor", "stepscope.ui.cli.lsp")


def is_own(module: str) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in OWN)


def test_nothing_outside_imports_it() -> None:
    users = {module for module, needed in house.imports().items() if any(map(is_own, needed))}
    assert {module for module in users if not is_own(module)} == set()


def test_without_it_the_other_verbs_work(golden: Path, tmp_path: Path) -> None:
    shutil.copytree(house.SOURCE, tmp_path / "stepscope")
    ui = tmp_path / "stepscope/ui"
    shutil.rmtree(ui / "lsp")
    shutil.rmtree(ui / "editor")
    (ui / "cli/lsp.py").unlink()
    page = ui / "front_page.py"
    lines = page.read_text().splitlines(keepends=True)
    others = [line for line in lines if '"lsp":' not in line]
    assert len(others) == len(lines) - 1
    page.write_text("".join(others))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stepscope", *words]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    shown = run("--help")
    assert (shown.returncode, "lsp" in shown.stdout) == (0, False), shown.stderr
    assert run("lsp").returncode == 2
    explained = run("explain", str(golden / "h200-resnet18"), "--no-cache")
    assert "\nverdict " in explained.stdout, explained.stderr
