"""torch.compile under capture: the same graphs, breaks, recompiles and bits, and steps counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

STEPS = 18
# Everything a script prints is compared: losses, parameters, and what dynamo counted.
SCRIPT = """
    import torch
    import torch._dynamo
    from torch._dynamo.utils import compilation_time_metrics as times, counters
    from torch.nn.functional import mse_loss

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    signs = []

    def batch(number):
        random = torch.Generator().manual_seed(number)
        rows = 6 if number < 5 else 7  # compiles again in a step that looks at memory
        return torch.randn(rows, 8, generator=random), torch.randn(rows, 4, generator=random)

    def looked_at(graph, inputs):
        signs.append([(node.op, node.name) for node in graph.graph.nodes])
        return graph.forward

    compiled = torch.compile(backend=looked_at)

%s

    for number in range(18):
        print(train(*batch(number)).item().hex())
    for parameter in model.parameters():
        print(parameter.sum().item().hex())
    print({kind: dict(counters[kind]) for kind in ("stats", "frames")})
    print(sum(counters["graph_break"].values()), len(times["_compile.compile_inner"]))
    print(*signs, sep="\\n")
"""
WHOLE = """
    @compiled
    def train(x, y):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()
"""
NESTED = """
    inner = torch.compile(model, backend=looked_at)

    @compiled
    def forward(x, y):
        return mse_loss(inner(x), y)

    @compiled
    def train(x, y):
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
"""
CLOSURE = """
    @compiled
    def train(x, y):
        def closure():
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss
        return optimizer.step(closure).detach()
"""
OPTIMIZER_ONLY = """
    @compiled
    def step():
        optimizer.step()

    def train(x, y):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        step()
        return loss.detach()
"""
SCALED = """
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    @compiled
    def train(x, y):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()
"""
HOOKED = """
    model[0].register_forward_hook(lambda module, args, output: output * 1.5)
    forward = torch.compile(model, backend=looked_at, fullgraph=True)

    def train(x, y):
        optimizer.zero_grad()
        loss = mse_loss(forward(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()
"""
MODES = """
    import gc, io
    gc.set_threshold(50)  # collects while compiled code runs

    @compiled
    def looked_at_twice(x):
        model.eval()
        quiet = model(x)
        model.train()
        return quiet.detach() + model(x)

    def train(x, y):
        optimizer.zero_grad()
        loss = mse_loss(looked_at_twice(x), y)
        loss.backward()
        optimizer.step()
        torch.save(model.state_dict(), io.BytesIO())
        return loss.detach()
"""
WAYS = {
    "whole": WHOLE,
    "nested": NESTED,
    "closure": CLOSURE,
    "optimizer only": OPTIMIZER_ONLY,
    "scaled": SCALED,
    "hooked": HOOKED,
    "modes": MODES,
}


def call(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


STEP_ON = ("optimizer", "backward", "dataloader", "forward")


def often(name: str) -> Any:
    """Each takes some 15 s: `make test-slow` has those that differ least from another."""
    rare = name in ("nested", "hooked", "scaled", "closure", "optimizer only", *STEP_ON[:3])
    return pytest.param(name, marks=pytest.mark.slow if rare else ())


def bare(folder: Path, way: str) -> tuple[Path, str]:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT % way))
    done = call([sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    return script, done.stdout


def captured(script: Path, out: Path, *options: str) -> tuple[str, dict[str, Any]]:
    ours = [sys.executable, "-m", "stepscope", "run", "--no-explain", "--out", str(out)]
    done = call([*ours, *options, "--", sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    ranks = json.loads((out / "run.json").read_text())["ranks"]
    return done.stdout, ranks[0] if ranks else {"steps": 0, "problems": []}


@pytest.mark.few(1)
@pytest.mark.parametrize("way", [*map(often, WAYS)])
def test_compiled_code_is_the_same_under_capture(tmp_path: Path, way: str) -> None:
    script, expected = bare(tmp_path, WAYS[way])
    output, rank = captured(script, tmp_path / "run")
    assert output == expected
    assert rank["steps"] == STEPS
    assert rank["problems"] == []
    assert "trace.json.gz" in rank["captured"]


@pytest.mark.parametrize(
    "step_on", [*map(often, ("optimizer", "backward", "dataloader", "forward"))]
)
def test_a_whole_compiled_step_is_the_same_whatever_is_watched(
    tmp_path: Path, step_on: str
) -> None:
    script, expected = bare(tmp_path, WHOLE)
    options = ("--step-on", step_on, "--nvtx", "--stacks", "--modules")
    output, _ = captured(script, tmp_path / "run", *options)
    assert output == expected
