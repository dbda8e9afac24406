"""Workloads outside the suite learn what is planted in their data."""

from __future__ import annotations

import pytest

from stepscope.bench import catalogue
from stepscope.bench.rules import steps_to_target
from stepscope.bench.workload import TrainingPlace

torch = pytest.importorskip("torch", reason="trains")

NAMES = sorted(catalogue.EXTRA)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "tabular" else pytest.mark.slow) for name in NAMES],
)
def test_tiny_reaches_its_target(name: str) -> None:
    workload = catalogue.load(name)
    target = workload.targets["tiny"]
    torch.manual_seed(0)
    step = workload.build(workload.config("tiny"), TrainingPlace(torch.device("cpu")))
    losses = [step(number).item() for number in range(target.steps)]
    assert steps_to_target(losses, target) is not None, losses


@pytest.mark.parametrize("name", NAMES)
def test_it_is_tagged_and_named_like_its_file(name: str) -> None:
    workload = catalogue.load(name)
    assert workload.name == name
    assert "extra" in workload.tags
    assert set(workload.sizes) == set(workload.targets) == {"tiny", "small", "paper"}
