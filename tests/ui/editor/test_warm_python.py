"""The process that runs scripts with fake tensors: it stays, and a script in it can be ended."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.errors import NotCapturedError
from stepscope.ui.editor.fake_run import FakeScript, end_warm_pythons, run_with_fakes, warm_python

TRAIN = """
import torch
from net import Net
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""
NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, WIDTH)
    def forward(self, x):
        return self.layer(x)
"""
HANGS = """
import os, pathlib, time
pathlib.Path(os.environ["STEPSCOPE_TEST_PIPE"]).open("rb").read(1)
"""
LIMIT_S = 300.0


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    end_warm_pythons()


def widths(folder: Path, net: str) -> set[int]:
    """Of the layer, as fakes saw it at its line."""
    script, module = folder / "train.py", folder / "net.py"
    texts = ((str(module), net), (str(script), TRAIN))
    answer = run_with_fakes(FakeScript(script, texts, (), sys.executable, folder), LIMIT_S)
    return {
        call.shapes[-1][-1]
        for call in answer.calls
        if (call.name, call.file, call.phase) == ("aten::addmm", str(module), "forward")
    }


@pytest.mark.slow
def test_imported_files_are_as_the_editor_has_them_and_a_hang_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("STEPSCOPE_TEST_PIPE", str(pipe))
    end_warm_pythons()  # a new one gets the variable
    (tmp_path / "net.py").write_text(NET.replace("WIDTH", "3"))
    assert widths(tmp_path, NET.replace("WIDTH", "3")) == {3}
    warm = warm_python(sys.executable)
    assert widths(tmp_path, NET.replace("WIDTH", "5")) == {5}

    script, stop = tmp_path / "hangs.py", threading.Event()
    hangs = FakeScript(script, ((str(script), HANGS),), (), sys.executable, tmp_path)

    def stop_in_its_read() -> None:
        with pipe.open("wb"):  # opens when the script comes to its read
            stop.set()
            over.wait(LIMIT_S)

    over = threading.Event()
    stopper = threading.Thread(target=stop_in_its_read)
    stopper.start()
    with pytest.raises(NotCapturedError, match="was stopped"):
        run_with_fakes(hangs, LIMIT_S, stop)
    over.set()
    stopper.join()
    with pytest.raises(NotCapturedError, match="second step within 1"):
        run_with_fakes(hangs, 1.0)
    assert widths(tmp_path, NET.replace("WIDTH", "6")) == {6}
    assert warm_python(sys.executable) is warm


def test_a_python_without_torch_says_so(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    script = FakeScript(
        tmp_path / "a.py", ((str(tmp_path / "a.py"), ""),), (), str(python), tmp_path
    )
    for _ in range(2):  # a new one is started each time
        with pytest.raises(NotCapturedError, match="No module named 'torch'"):
            run_with_fakes(script, LIMIT_S)
    missing = script._replace(python=str(tmp_path / "none"))
    with pytest.raises(NotCapturedError, match="cannot be started"):
        run_with_fakes(missing, LIMIT_S)
