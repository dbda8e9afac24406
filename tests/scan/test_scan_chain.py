"""A chain of layers back by Blelloch's scan: autograd's gradients, and counted products."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from stepscope.fix.scan.chain import product_flops, scan_chain, transposed_jacobian


def pruned(model: nn.Sequential, share: float) -> nn.Sequential:
    """The smallest weights of each layer are zero."""
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            with torch.no_grad():
                limit = layer.weight.abs().flatten().quantile(share)
                layer.weight.mul_(layer.weight.abs() > limit)
    return model


def small_vgg() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = (2, 4, 4, 6)
    for first, second in pairwise(channels):
        layers += [nn.Conv2d(first, second, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        *layers[:4], nn.MaxPool2d(2), *layers[4:], nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24, 5)
    ).double()


LAYERS = [
    (nn.Linear(6, 4), (6,)),
    (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (4, 7, 5)),
    (nn.Conv2d(2, 3, (3, 1), dilation=2), (2, 8, 4)),
    (nn.MaxPool2d(3, stride=2, padding=1), (2, 7, 7)),
    (nn.AvgPool2d(2), (3, 6, 4)),
    (nn.ReLU(), (3, 4)),
    (nn.GELU(), (5,)),
    (nn.LayerNorm(4), (3, 4)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda value: str(value))
def test_a_jacobian_is_autograds(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer = copy.deepcopy(layer).double()
    sample = torch.randn(shape, dtype=torch.float64)

    def outputs(given: torch.Tensor) -> torch.Tensor:
        return layer(given.unsqueeze(0)).squeeze(0)

    right = torch.autograd.functional.jacobian(outputs, sample)
    ours = transposed_jacobian(layer, sample)
    assert ours is not None
    torch.testing.assert_close(ours.to_dense().t(), right.reshape(-1, sample.numel()))


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_gradients_are_those_of_the_sequential(share: float) -> None:
    plain = pruned(small_vgg(), share)
    ours = scan_chain(copy.deepcopy(plain))
    inputs = torch.randn(3, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    gradients = [
        torch.autograd.grad(model(inputs).pow(2).sum(), [inputs, *model.parameters()])
        for model in (ours, plain)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_a_shared_layer_gets_the_sum_of_its_gradients() -> None:
    layer = nn.Linear(3, 3).double()
    ours, plain = scan_chain([layer, nn.Tanh(), layer]), nn.Sequential(layer, nn.Tanh(), layer)
    inputs = torch.randn(2, 3, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(ours(inputs).sum(), list(layer.parameters())),
        torch.autograd.grad(plain(inputs).sum(), list(layer.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_the_scan_has_logarithmically_many_levels() -> None:
    for count in (4, 16, 60):
        chain = scan_chain([nn.Linear(3, 3, bias=False) for _ in range(count)])
        levels = chain.analyse(torch.randn(3)).levels
        assert len(levels) <= 2 * math.ceil(math.log2(count + 2))


def test_flops_of_a_product_by_hand() -> None:
    """[[1, 2], [0, 3]] times [[4, 0], [5, 6]]: 1*4, 2*5, 2*6, 3*5, 3*6, each with an addition."""
    left = torch.tensor([[1.0, 2.0], [0.0, 3.0]]).to_sparse()
    right = torch.tensor([[4.0, 0.0], [5.0, 6.0]])
    assert product_flops(left, right.to_sparse()) == 10
    assert product_flops(left, right[:, :1]) == 6


def test_pruning_makes_the_products_cheaper() -> None:
    sample = torch.randn(2, 8, 8, dtype=torch.float64)
    dense = scan_chain(pruned(small_vgg(), 0.0)).analyse(sample)
    sparse = scan_chain(pruned(small_vgg(), 0.97)).analyse(sample)
    critical = [sum(level.largest for level in one.levels) for one in (dense, sparse)]
    assert critical[1] < critical[0] / 10
    assert max(sparse.densities) <= max(dense.densities)


def test_a_chain_has_a_layer() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        scan_chain([])
