"""%%stepscope captures a training cell in the kernel's own process and leaves no trace in it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.measure import patches
from stepscope.records.explanation import Explanation

pytest.importorskip("IPython")
torch = pytest.importorskip("torch")

MODEL = """
import torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        optimizer.step()
    return steps
"""
SHORT = "--no-memory --wait 1 --warmup 1 --steps 2"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance(colors="nocolor", history_length=0)
    shell.run_line_magic("load_ext", "stepscope")
    assert shell.run_cell(MODEL).success
    yield shell
    shell.run_line_magic("unload_ext", "stepscope")
    InteractiveShell.clear_instance()


@pytest.fixture
def shell(kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return kernel


def _patched() -> list[object]:
    """What hooks replace, or add to."""
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    return [
        torch.autograd._engine_run_backward,
        torch.autograd.graph._engine_run_backward,
        torch.nn.Module.train,
        torch.autograd.profiler.profile.__exit__,
        torch.save,
        dataloader.DataLoader.__iter__,
        dataloader._BaseDataLoaderIter.__next__,
        torch.amp.GradScaler.step,
        len(gc.callbacks),
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
        {name: len(actions) for name, actions in patches._actions.items() if actions},
    ]


def test_a_captured_cell_is_explained_and_leaves_kernel_and_names_as_they_were(
    shell: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names, patched = set(shell.user_ns), _patched()
    for _ in range(2):  # a cell may be run again
        done = shell.run_cell(f"%%stepscope {SHORT} --name run --html r.html\ntrain(8) + 1")
        assert done.success
        assert done.result == 9
        assert _patched() == patched
    new = {name for name in set(shell.user_ns) - names if not name.startswith("_")}
    assert new == {"run"}
    run = shell.user_ns.pop("run")
    assert isinstance(run, Explanation)
    assert run.ranks[0].steps.source == "profiler"
    assert len(run.ranks[0].steps.steps) == 2
    printed = capsys.readouterr()
    assert printed.out.count("<Explanation: ") == 2
    assert "stepscope: run folder stepscope-runs/" in printed.out
    assert len(list(tmp_path.glob("stepscope-runs/*-notebook*/rank-00000/trace.json.gz"))) == 2
    assert "<html" in (tmp_path / "r.html").read_text()[:200]


def test_an_error_in_the_cell_is_the_cells_own(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    patched = _patched()
    done = shell.run_cell(f"%%stepscope {SHORT}\nkept = train(3)\nfailed = kept / 0")
    assert isinstance(done.error_in_exec, ZeroDivisionError)
    assert shell.user_ns.pop("kept") == 3
    assert "failed" not in shell.user_ns
    assert _patched() == patched
    printed = capsys.readouterr().out
    assert "failed = kept / 0" in printed
    assert "magic.py" not in printed  # our frames are hidden
    assert not shell.run_cell("%%stepscope\nif:").success


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("%%stepscope\nx = 1", "no training step was seen"),
        ("%%stepscope\ntrain(2)", "2 steps seen, too few to record"),
        (f"%%stepscope {SHORT} --out here/there\ntrain(6);", "run folder here/there"),
    ],
)
def test_what_was_captured_is_said(
    shell: Any, capsys: pytest.CaptureFixture[str], cell: str, says: str
) -> None:
    assert shell.run_cell(cell).success
    printed = capsys.readouterr()
    assert says in printed.err + printed.out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--steps none", "invalid whole number value: 'none'"),
        ("--steps 0", "0 is less than 1"),
        ("--name 1x", "not a variable name"),
        ("--html no/such/folder.html", "its folder does not exist"),
        ("--out .", "never overwritten"),
        ("--colour 'red", "No closing quotation"),
        ("--colour red", "--help lists the options"),
    ],
)
def test_wrong_options_are_one_line_and_the_cell_does_not_run(
    shell: Any, capsys: pytest.CaptureFixture[str], options: str, says: str
) -> None:
    Path("something").write_text("")
    assert not shell.run_cell(f"%%stepscope {options}\nran = True").success
    printed = capsys.readouterr()
    assert says in printed.err + printed.out
    assert "Traceback" not in printed.err + printed.out
    assert "ran" not in shell.user_ns


def test_help_lists_the_options(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run_cell("%%stepscope --help\nran = True").success
    assert "--step-on" in capsys.readouterr().out
    assert "ran" not in shell.user_ns


def test_a_cell_runs_where_nothing_can_be_captured(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("stepscope-runs").write_text("a file where the folder should be")
    done = shell.run_cell("%%stepscope\ntrain(1)")
    assert done.result == 1
    assert "nothing is captured" in capsys.readouterr().err
