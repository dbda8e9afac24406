"""scan_chain on layers as people write them: in place, nested, in eval."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from stepscope.fix.scan import scan_chain
from stepscope.fix.scan.affine_maps import SecondDerivativeError


def assert_trains_like(layers: nn.Sequential, *shape: int) -> None:
    """Gradients of the inputs and of every parameter."""
    plain, chained = layers.double(), copy.deepcopy(layers).double()
    inputs = torch.randn(*shape, dtype=torch.float64)
    found = []
    for model, forward in ((plain, plain), (chained, scan_chain(chained))):
        given = inputs.clone().requires_grad_()
        forward(given * 1).sin().sum().backward()
        found.append([given.grad, *(one.grad for one in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_layers_in_place_keep_what_they_were_given() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.SiLU(inplace=True), nn.Linear(6, 5), nn.ELU(inplace=True), nn.Linear(5, 4),
        nn.LeakyReLU(0.1, inplace=True), nn.Linear(4, 2), nn.ReLU(inplace=True),
    )  # fmt: skip
    assert_trains_like(layers, 3, 6)


def test_batch_norm_and_dropout_in_eval() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3), nn.Dropout(),
    )  # fmt: skip
    layers[1].running_var.uniform_(0.5, 2.0)
    assert_trains_like(layers.eval(), 3, 2, 8, 8)


def test_a_sequential_inside_counts_as_its_layers() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    chain = scan_chain(nn.Sequential(inner, nn.ReLU()))
    assert [type(layer) for layer in chain.layers] == [nn.Linear, nn.Tanh, nn.Linear, nn.ReLU]


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.BatchNorm1d(4), "mixes the samples"),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), "mixes the samples"),
        (nn.Dropout(), "random in training"),
        (nn.RReLU(), "random in training"),
        (nn.Flatten(0), "mixes the samples"),
        (nn.MaxPool1d(2, return_indices=True), "returns a tuple"),
    ],
    ids=repr,
)
def test_what_has_no_jacobian_of_a_sample_is_refused(layer: nn.Module, why: str) -> None:
    chain = scan_chain([nn.Linear(4, 4), layer])
    with pytest.raises(ValueError, match=why):
        chain(torch.randn(3, 4))


def test_a_second_derivative_is_refused() -> None:
    inputs = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(SecondDerivativeError):
        torch.autograd.grad(
            scan_chain([nn.Linear(3, 3), nn.Tanh()])(inputs).sum(), inputs, create_graph=True
        )


def test_no_sample() -> None:
    layer = nn.Linear(3, 2)
    scan_chain([layer, nn.ReLU()])(torch.randn(0, 3)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros(2, 3))
