"""A real training step on this machine: what a trace tells against torch, capture and a hand."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from stepscope import read_trace
from stepscope.explain.memory.lifetimes import find_lifetimes
from stepscope.records.memory import CATEGORIES

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch")

BATCH, WIDTHS = 64, (256, 1024, 512, 10)
PARAMETERS = 4 * sum(a * b + b for a, b in itertools.pairwise(WIDTHS))
# Outputs of both ReLUs and of log_softmax, and the loss's total weight: what backward needs.
SAVED = 4 * BATCH * (WIDTHS[1] + WIDTHS[2] + WIDTHS[3]) + 4


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> tuple[Path, Any]:
    from torch import nn
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    layers: list[Any] = []
    for into, out in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(into, out), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        inputs, labels = torch.randn(BATCH, WIDTHS[0]), torch.randint(0, 10, (BATCH,))
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=True,
            with_stack=True,
            profile_memory=True,
        ) as profiler:
            step()
        path = tmp_path_factory.mktemp("memory") / "trace.json"
        profiler.export_chrome_trace(str(path))
    return path, profiler


def _largest(path: Path) -> dict[str, int]:
    lifetimes = find_lifetimes(read_trace(path))
    assert lifetimes is not None
    return dict(zip(CATEGORIES, lifetimes.levels().max(axis=1).tolist(), strict=True))


def test_activations_are_exactly_what_backward_needs(profiled):
    assert _largest(profiled[0])["activations"] == SAVED


def test_gradients_are_as_large_as_the_parameters(profiled):
    assert _largest(profiled[0])["gradients"] == PARAMETERS


def test_torchs_own_memory_profiler_counts_the_same(profiled):
    """Its categories differ: activations are all that forward makes, gradients all that backward
    makes. Parameters and inputs are what ours are told from."""
    from torch.profiler._memory_profiler import (
        _CATEGORY_TO_INDEX,
        Category,
        MemoryProfileTimeline,
    )

    path, profiler = profiled
    timeline = MemoryProfileTimeline(profiler._memory_profile())
    _, sizes = timeline._coalesce_timeline("cpu")

    def most(category: Any) -> int:
        return max(row[_CATEGORY_TO_INDEX[category] + 1] for row in sizes)

    ours = _largest(path)
    assert ours["gradients"] == most(Category.PARAMETER) == PARAMETERS
    assert ours["other"] == most(Category.INPUT)
    assert ours["activations"] <= most(Category.ACTIVATION)
