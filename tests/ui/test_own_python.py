"""Modules of the folder that we are started in never run: nobody asked for them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stepscope.loggers import _explain
from stepscope.ui.editor.fake_run import WarmPython
from stepscope.ui.editor.profile_child import profile_script
from stepscope.ui.jobs.environment import own_python, own_ranks
from stepscope.ui.lsp.script_jobs import WorkRoom
from stepscope.ui.probe import ProbeChild
from stepscope.ui.serve.listed_runs import text_of
from stepscope.ui.serve.served_runs import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

HOME = Path(__file__).parents[2]
GOLDEN = HOME / "tests" / "golden" / "h200-resnet18"
SHADOWS = ("json", "msgspec", "stepscope", "numpy", "torch", "click", "pygls", "random", "shlex")
SERVER = HOME / "editors" / "vscode" / "src" / "interpreter.ts"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: modules that say so when they are imported, and a run."""
    for name in SHADOWS:
        text = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + '\\n')\n1 / 0\n"
        (tmp_path / f"{name}.py").write_text(text)
    shutil.copytree(GOLDEN, tmp_path / "run")
    (tmp_path / "train.py").write_text("print('no training')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def summarise(folder: Path) -> Any:
    worker = WorkerProcess()
    try:
        job = {"job": "summarise", "path": text_of(folder / "run"), "kind": "run"}
        return worker.ask(60, **job)["state"]
    finally:
        worker.close()


def write_report(folder: Path) -> Any:
    WorkRoom().write_report(folder / "run", folder / "report.html", threading.Event())
    return (folder / "report.html").is_file()


def profile(folder: Path) -> Any:
    answer = profile_script(folder / "train.py", (), limit_s=60, folder=folder / "new")
    assert "without a training step" in (answer.failed or ""), answer
    return True


def wait_warm(_folder: Path) -> Any:
    python = WarmPython(sys.executable)
    assert python._process.stdin is not None
    python._process.communicate(timeout=60)  # with its input it ends, once torch is imported
    ended = python._process.returncode
    python._errors.seek(0)
    assert ended == 0, python._errors.read()
    python._errors.close()
    return True


def probe(_folder: Path) -> Any:
    with ProbeChild() as child:
        return child.device()


@pytest.mark.parametrize(
    "act",
    [summarise, write_report, profile, lambda folder: _explain(folder / "run")],
    ids=["serve", "report", "profile", "loggers"],
)
def test_children_import_nothing_of_the_folder(hostile: Path, act: Callable[[Path], Any]) -> None:
    assert act(hostile)
    assert not (hostile / "ran").exists()


@pytest.mark.parametrize("act", [wait_warm, probe])
def test_children_with_torch_import_nothing_of_the_folder(
    hostile: Path, act: Callable[[Path], Any]
) -> None:
    pytest.importorskip("torch")
    assert act(hostile)
    assert not (hostile / "ran").exists()


def test_the_editors_server_imports_nothing_of_the_folder(hostile: Path) -> None:
    """As VS Code starts it; without an editor it ends at once."""
    pytest.importorskip("pygls")
    (arguments,) = re.findall(r"serverArguments.* = (\[.*\]);", SERVER.read_text())
    command = [sys.executable, *json.loads(arguments)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert not (hostile / "ran").exists()
    assert b"Traceback" not in done.stderr


def test_the_command_imports_nothing_of_the_folder(hostile: Path) -> None:
    stepscope = Path(sysconfig.get_path("scripts")) / "stepscope"
    done = subprocess.run(
        [stepscope, "explain", "run", "--json", "--no-cache"], capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not (hostile / "ran").exists()


def test_ranks_import_nothing_of_the_folder() -> None:
    """torchrun starts them with a plain `python -m` unless told otherwise."""
    assert own_ranks(2, "stepscope.bench.demo")[-5:] == [
        "--no-python",
        *own_python("stepscope.bench.demo"),
    ]


def test_every_process_of_ours_is_started_in_one_place() -> None:
    """A command with `-m` or `-c` that names this Python stands in own_python.py only."""
    source = HOME / "src" / "stepscope"
    found = [
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        if re.search(r"sys\.executable,\s*\"-[mc]", file.read_text())
    ]
    assert not found
