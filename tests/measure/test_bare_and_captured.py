"""Trainings that capture once broke: bare and captured, they end alike."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

THREADS = """
    import torch
    from concurrent.futures import ThreadPoolExecutor

    def train(seed):
        random = torch.Generator().manual_seed(seed)
        weight = torch.ones(8, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.01)
        for _ in range(40):
            loss = (torch.randn(8, generator=random) * weight).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item().hex()

    with ThreadPoolExecutor(3) as pool:
        print(*pool.map(train, range(6)), sep="\\n")
"""
OWN_PROFILER = """
    import torch
    from torch.profiler import profile, schedule

    weight = torch.ones(8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.01)
    names = set()
    plan = schedule(wait=3, warmup=8, active=2, repeat=1)
    keep = lambda trace: names.update(event.name for event in trace.events())
    with profile(schedule=plan, on_trace_ready=keep) as profiler:
        for _ in range(20):
            optimizer.zero_grad()
            weight.sinh().sum().backward()
            optimizer.step()
            profiler.step()
    print("aten::sinh" in names, weight.sum().item().hex())
"""
RECOMPILED = """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for step in range(8):
        rows = 4 if step < 5 else 5  # compiles again in the step that looks at memory
        loss = compiled(torch.ones(rows, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
"""
CAUGHT = """
    import torch

    class Moody(torch.optim.SGD):
        calls = 0

        def step(self, closure=None):
            Moody.calls += 1
            if Moody.calls == 2:
                raise ValueError
            return super().step(closure)

    first, second = (torch.ones(3, requires_grad=True) for _ in range(2))
    moody, other = Moody([first], lr=0.1), torch.optim.SGD([second], lr=0.1)
    for _ in range(12):
        (first.sum() + second.sum()).backward()
        try:
            moody.step()
        except ValueError:
            print("caught")
        other.step()
        print(first.sum().item().hex())
"""


def call(script: Path, *ours: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, ours), sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def written(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text))
    return script


def both(folder: Path, text: str, *options: str) -> dict[str, Any]:
    """Run it bare and captured; the first rank as run.json has it."""
    script = written(folder, text)
    bare = call(script)
    ours = [sys.executable, "-m", "stepscope", "run", "--no-explain", "--out", folder / "run"]
    captured = call(script, *ours, *options, "--")
    assert bare.returncode == 0, bare.stderr
    assert (captured.returncode, captured.stdout) == (0, bare.stdout), captured.stderr
    rank: dict[str, Any] = json.loads((folder / "run/run.json").read_text())["ranks"][0]
    return rank


def test_training_in_threads_counts_the_first_and_leaves_the_profiler_off(tmp_path: Path) -> None:
    rank = both(tmp_path, THREADS)
    assert rank["steps"] >= 40
    assert any(problem.startswith("threads") for problem in rank["problems"])


def test_a_profiler_in_its_warm_up_keeps_its_trace(tmp_path: Path) -> None:
    rank = both(tmp_path, OWN_PROFILER, "--wait", "6")
    assert rank["steps"] == 20
    assert "own profiler is running" in rank["missing"]["trace.json.gz"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("--step-on", "forward"),
        pytest.param(("--nvtx",), marks=pytest.mark.slow),
    ],
)
def test_a_full_graph_stays_one_whatever_capture_does(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert both(tmp_path, RECOMPILED, *options)["steps"] == 8


def test_a_caught_exception_in_an_optimizer_does_not_blind_capture(tmp_path: Path) -> None:
    assert both(tmp_path, CAUGHT)["steps"] >= 11


def test_a_defect_in_explaining_is_not_the_jobs_exit_code(tmp_path: Path) -> None:
    script = written(tmp_path, CAUGHT)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'stepscope' in ' '.join(sys.orig_argv) and 'train.py' in ' '.join(sys.orig_argv):\n"
        "    import stepscope.ui.api as api\n"
        "    api.explain_paths = lambda *_, **__: 1 / 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "run", "--out", str(tmp_path / "run"), "--", script],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0
    assert "explaining it failed: a defect in stepscope: ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGHUP", "SIGTERM"])
def test_a_signal_sent_to_us_reaches_the_command(tmp_path: Path, name: str) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import signal, sys, time\n"
        f"signal.signal(signal.{name}, lambda *_: (print('heard', flush=True), sys.exit(7)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    ours = [sys.executable, "-m", "stepscope", "run", "--out", str(tmp_path / "run"), "--"]
    command = [*ours, sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(getattr(signal, name))
        assert process.stdout.read() == "heard\n"
        assert process.wait(30) == 7
