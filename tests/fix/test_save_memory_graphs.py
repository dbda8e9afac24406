"""save_memory while a CUDA graph is captured: what cannot be held in a graph is kept, and said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from stepscope.fix import save_memory
from stepscope.fix.saved import save_plan
from stepscope.fix.saved.encodings import encode_use, encode_value
from stepscope.fix.saved.encodings.outcomes import _TABLES
from stepscope.fix.saved.memory_saver import MemorySaver

STEPS_BEFORE = 5


def make(device: str = "cpu") -> nn.Module:
    """Its ReLUs are mostly zero before a convolution: worth a mask and what is not zero."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        convolution = nn.Conv2d(4, 4, 3, padding=1)
        nn.init.constant_(convolution.bias, -1.0)
        layers += [convolution, nn.ReLU(), nn.Conv2d(4, 4, 1), nn.LeakyReLU(0.1), nn.MaxPool2d(2)]
    return nn.Sequential(*layers).to(device)


def batch(device: str = "cpu") -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 4, 32, 32, device=device)


def gradients(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    loss = model(inputs).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Kernels may be chosen differently in a graph."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, torch says that a graph is captured."""

    def begin() -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    return begin


def words_of(saver: MemorySaver) -> set[str]:
    assert saver.plan is not None
    encoded = [use.encoding for use in saver.plan.uses if use.action == save_plan.ENCODE]
    return {encoding.partition(" ")[0] for encoding in encoded if encoding}


def test_what_differs_in_size_is_kept_in_a_graph(captured: Callable[[], None]) -> None:
    model, inputs = make(), batch()
    expected = gradients(model, inputs)
    saver = save_memory(model)
    for _ in range(STEPS_BEFORE):
        gradients(model, inputs)
    assert "sparse" in words_of(saver)
    assert not saver.notes
    captured()
    assert all(map(torch.equal, gradients(model, inputs), expected))
    assert len(saver.notes) == 1
    assert "CUDA graph" in saver.notes[0]
    assert "sparse" in saver.notes[0]


def test_a_graph_captured_too_early_keeps_everything(captured: Callable[[], None]) -> None:
    model, inputs = make(), batch()
    expected = gradients(model, inputs)
    saver = save_memory(model)
    captured()
    assert all(map(torch.equal, gradients(model, inputs), expected))
    assert saver.plan is None
    assert "before the capture" in saver.notes[0]


def test_nothing_of_a_graph_is_used_outside(captured: Callable[[], None]) -> None:
    """A tensor that a capture made lies in the graph's memory."""
    _TABLES.clear()
    values = torch.linspace(-1, 1, 64)
    outside = encode_use("above 0.0", values)
    known = dict(_TABLES)
    captured()
    inside = encode_use("within -0.5 0.5", values)
    assert outside is not None
    assert inside is not None
    assert ((outside.decode() > 0) == (values > 0)).all()
    assert ((inside.decode().abs() < 0.5) == (values.abs() < 0.5)).all()
    assert known.keys() == _TABLES.keys()
    assert encode_value("sparse", values) is None
    assert encode_value("narrow int8", values.long()) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_whole_step_with_a_plan_is_captured() -> None:
    model, inputs = make("cuda"), batch("cuda")
    saver = save_memory(model)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(STEPS_BEFORE):
            gradients(model, inputs)
    torch.cuda.current_stream().wait_stream(side)
    assert saver.held_bytes is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = gradients(model, inputs)
    saver.remove()
    for seed in range(3):
        torch.manual_seed(seed)
        inputs.copy_(torch.randn_like(inputs))
        graph.replay()
        assert_close(replayed, gradients(model, inputs))
    if words_of(saver) & {"sparse", "narrow"}:
        assert any("CUDA graph" in note for note in saver.notes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # torch's own capture
def test_a_graphed_callable_can_be_part_of_the_model() -> None:
    """It is one operator to the planner; torch refuses to graph a module that has hooks."""
    model, inputs = make("cuda"), batch("cuda")
    expected = gradients(model, inputs)
    sample = torch.randn(4, 4, 16, 16, device="cuda", requires_grad=True)
    last = torch.cuda.make_graphed_callables(nn.Sequential(*model[5:]), (sample,))
    whole = nn.Sequential(*model[:5], last)
    saver = save_memory(whole)
    for _ in range(STEPS_BEFORE):
        found = gradients(whole, inputs)
    assert_close(found, expected)
    saver.remove()
