"""A ScanRNN in the place of an nn.RNN that a script has dressed up, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from stepscope.errors import RefusedError
from stepscope.fix.scan import ScanRNN, affine_maps, scan_backward
from stepscope.fix.scan.rnn_layer import backward_states


def gradients(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(inputs)[0].pow(2).sum().backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("name", ["orthogonal", "weight_norm"])
def test_parametrized_weights_stay_parametrized(name: str) -> None:
    torch.manual_seed(0)
    plain = getattr(parametrizations, name)(nn.RNN(3, 4).double(), "weight_hh_l0")
    inputs = torch.randn(9, 2, 3, dtype=torch.float64)
    right = gradients(plain, inputs)
    ours = scan_backward(plain)
    assert isinstance(ours, ScanRNN)
    for a, b in zip(gradients(ours, inputs), right, strict=True):
        torch.testing.assert_close(a, b)
    assert list(ours.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(ours.all_weights[0][1], plain.weight_hh_l0)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_hooks_go_along() -> None:
    """torch's first weight_norm is a hook that computes the weight before every call."""
    torch.manual_seed(0)
    plain = nn.utils.weight_norm(nn.RNN(3, 4), "weight_hh_l0")
    calls: list[str] = []
    handle = plain.register_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    inputs = torch.randn(9, 2, 3)
    right = gradients(plain, inputs)
    ours = scan_backward(nn.ModuleList([plain]))[0]
    for a, b in zip(gradients(ours, inputs), right, strict=True):
        torch.testing.assert_close(a, b)
    handle.remove()
    ours(inputs)
    assert calls == ["RNN", "ScanRNN"]


def test_a_module_in_two_places_stays_one() -> None:
    model = nn.Module()
    model.first = model.second = nn.RNN(3, 3)
    scan_backward(model)
    assert type(model.first) is ScanRNN
    assert model.first is model.second


def test_it_has_what_scripts_ask_of_an_rnn() -> None:
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "batch_first": True}
    plain, ours = nn.RNN(3, 4, **options), ScanRNN(3, 4, **options)
    torch.manual_seed(5)
    plain.reset_parameters()
    torch.manual_seed(5)
    ours.reset_parameters()
    for a, b in zip(ours.all_weights, plain.all_weights, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)
    assert repr(ours) == repr(plain).replace("RNN(", "ScanRNN(")[:-1] + ", precision='tf32x3')"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_states_of_16_bits_go_back_in_32(kind: torch.dtype) -> None:
    """Products of the Jacobians, and their powers of two, pass what 16 bits hold; the gradient,
    which starts at the last step and comes to nothing, does not."""
    torch.manual_seed(0)
    weight, gradient = (1.3 * torch.eye(2)).to(kind), torch.zeros(1200, 1, 2, dtype=kind)
    gradient[-1] = 1
    states = torch.where(torch.arange(1200) < 600, 0.1, 0.9).view(-1, 1, 1).expand(-1, 1, 2)
    states = states.to(kind).contiguous()
    slope = 1 - states.double() ** 2
    right, _ = affine_maps.backward_states(gradient.double(), slope, weight.double(), 1200)
    found, _ = backward_states(gradient, states, weight, tanh=True)
    assert found.dtype == kind
    assert torch.equal(found, right.to(kind))


def test_another_dtype_is_refused_but_under_autocast() -> None:
    ours, inputs = ScanRNN(3, 4), torch.randn(5, 2, 3)
    with pytest.raises(ValueError, match=r"torch\.float64 and the weights are torch\.float32"):
        ours(inputs.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(inputs.bfloat16())[0].dtype == torch.float32


class OwnRnn(nn.RNN):
    """What it adds is not known."""


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(OwnRnn(3, 4)), "OwnRnn, a subclass"),
        (nn.LSTM(3, 4, proj_size=2), "no scan for an nn.LSTM with proj_size=2"),
        (nn.Linear(3, 4), "no nn.RNN, nn.GRU or nn.LSTM in Linear"),
        (ScanRNN(3, 4), "already uses a scan"),
        ("model", "takes a module, not a str"),
    ],
)
def test_what_cannot_be_replaced_is_refused(model: Any, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        scan_backward(model)
