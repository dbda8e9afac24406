"""A chain of layers back by Blelloch's scan: autograd's gradients, and counted products."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
import torch
from torch import nn

from stepscope.fix.scan.affine_maps import SecondDerivativeError
from stepscope.fix.scan.chain import blelloch, product_flops, scan_chain, transposed_jacobian


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


# Blelloch's scan: the prefixes of a plain loop, in few levels.

LENGTHS = (1, 2, 3, 5, 8, 13, 64, 100)


def letters(count: int) -> list[str]:
    return [chr(ord("a") + place % 26) for place in range(count)]


def scanned(
    count: int, combine: Callable[[str, str], str] = str.__add__
) -> tuple[list[str], list[None]]:
    """Prefixes and levels; `+` of strings is not commutative, so a wrong order shows."""
    levels: list[None] = []
    return blelloch(letters(count), combine, "", lambda: levels.append(None)), levels


@pytest.mark.parametrize("count", LENGTHS)
def test_every_prefix_without_its_last_element(count: int) -> None:
    assert scanned(count)[0] == ["", *list(accumulate(letters(count)))[:-1]]


@pytest.mark.parametrize("count", LENGTHS[1:])
def test_the_critical_path_is_logarithmic(count: int) -> None:
    assert len(scanned(count)[1]) == 2 * math.ceil(math.log2(count))


def test_it_does_about_twice_the_work() -> None:
    """64 elements: 63 up and 63 down."""
    pairs = []

    def counted(a: str, b: str) -> str:
        pairs.append((a, b))
        return a + b

    scanned(64, counted)
    assert len(pairs) == 63 + 63
