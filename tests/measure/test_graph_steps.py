"""Steps of a training that a CUDA graph replays, with a graph that runs its function on the CPU."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stepscope.measure.never_raise import problems
from stepscope.measure.watch import watch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class FakeCUDAGraph:
    """As torch.cuda.CUDAGraph."""

    function: Callable[[], Any]

    def capture_begin(self, pool: Any = None) -> None:
        """Everything that is called until capture_end is recorded."""

    def capture_end(self) -> None:
        """The recording is complete."""

    def replay(self) -> None:
        """As the device would: nothing of it is seen by Python's hooks."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[FakeCUDAGraph]:
    graph = type("CUDAGraph", (FakeCUDAGraph,), {})
    module = ModuleType("torch.cuda.graphs")
    module.CUDAGraph = graph  # type: ignore[attr-defined]
    module.graph = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.cuda.graphs", module)
    return graph


def train(graph: FakeCUDAGraph, *, with_optimizer: bool, replays: int) -> None:
    """Two eager steps, a capture, and replays."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*, updates: bool) -> None:
        model(torch.ones(2, 4)).sum().backward()
        if updates:
            optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(updates=True)
    graph.capture_begin()
    step(updates=with_optimizer)
    graph.capture_end()
    for _ in range(replays):
        graph.replay()


def steps_of(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("rank-*/steps.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in rows if "last" not in row]


@pytest.mark.parametrize(("with_optimizer", "steps"), [(True, 7), (False, 2)])
def test_replays_of_an_optimizers_step_are_steps_and_its_capture_is_none(
    graphs: type[FakeCUDAGraph], tmp_path: Path, with_optimizer: bool, steps: int
) -> None:
    with watch(tmp_path / "run", step_on="auto", wait=100) as run:
        train(graphs(), with_optimizer=with_optimizer, replays=5)
    rows = steps_of(run.folder)
    assert [row["step"] for row in rows] == list(range(steps))
    assert "capture_begin" not in vars(graphs)
    assert not [one for one in problems() if "graph steps" in str(one)]
