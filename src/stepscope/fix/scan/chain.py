"""A chain of layers whose backward pass is Blelloch's scan over sparse Jacobians (BPPSA).

    model = scan_chain(nn.Sequential(...))     # trains like the Sequential
    print(model.analyse(sample))               # products and FLOPs a level of the scan

The gradient at every layer is a prefix product of transposed Jacobians, applied to the loss's
gradient. Each level of the scan multiplies matrices that do not wait for each other, so the
critical path is logarithmic in the number of layers; whether that pays depends on how sparse the
products stay, which `analyse` counts. This is a laboratory: Jacobians are made for every sample.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stepscope.fix.scan.second_derivative import refuse_second_derivative
from stepscope.fix.scan.sparse_jacobians import transposed_jacobian, why_refused
from stepscope.fix.scan.textbook import blelloch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelCost:
    """Products of one level of the scan, which could run at the same time."""

    products: int
    flops: int
    largest: int  # FLOPs of the most expensive product: the level's part of the critical path


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainAnalysis:
    """What the scan of one sample costs, and what going back layer by layer costs."""

    densities: tuple[float, ...]  # of each layer's Jacobian, first layer first
    levels: tuple[LevelCost, ...]
    one_by_one: tuple[int, ...]  # FLOPs of each layer's product with the gradient, last layer first

    @property
    def critical_flops(self) -> int:
        return sum(level.largest for level in self.levels)

    @property
    def chain_flops(self) -> int:
        return sum(self.one_by_one)


class _Products:
    """`combine` of the scan: sparse products, with their FLOPs counted by level."""

    def __init__(self) -> None:
        self.levels: list[list[int]] = []

    def begin_level(self) -> None:
        self.levels.append([])

    def combine(self, earlier: Tensor | None, later: Tensor | None) -> Tensor | None:
        """`None` is the identity."""
        if earlier is None or later is None:
            return later if earlier is None else earlier
        self.levels[-1].append(product_flops(later, earlier))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            product: Tensor = torch.sparse.mm(later, earlier)
        return product.coalesce() if product.is_sparse else product

    def costs(self) -> tuple[LevelCost, ...]:
        return tuple(
            LevelCost(products=len(level), flops=sum(level), largest=max(level))
            for level in self.levels
            if level
        )


def product_flops(left: Tensor, right: Tensor) -> int:
    """Multiplications and additions of a product whose zeros are skipped."""
    columns = torch.bincount(left.indices()[1], minlength=left.shape[1])
    if not right.is_sparse:
        return 2 * int(columns.sum()) * int(right.shape[1])
    rows = torch.bincount(right.indices()[0], minlength=right.shape[0])
    return 2 * int((columns * rows).sum())


class ScanChain(nn.Module):
    """Trains like nn.Sequential of the same layers, whose parameters it shares."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = _BackwardByScan.apply(self, inputs, *self.parameters())
        return outputs

    def analyse(self, sample: Tensor) -> ChainAnalysis:
        """Of one sample, without its batch dimension."""
        jacobians = [transposed_jacobian(*pair) for pair in self._given(sample)]
        known = [jacobian for jacobian in jacobians if jacobian is not None]
        gradient = torch.ones(known[-1].shape[1], 1, dtype=sample.dtype, device=sample.device)
        products = _Products()
        _prefixes(gradient, jacobians, products)
        return ChainAnalysis(
            densities=tuple(one.values().numel() / one.numel() for one in known),
            levels=products.costs(),
            one_by_one=tuple(2 * one.values().numel() for one in reversed(known)),
        )

    def _given(self, sample: Tensor) -> list[tuple[nn.Module, Tensor]]:
        """Each layer with what it is given for this sample."""
        with torch.no_grad():
            given, value = [], sample.unsqueeze(0)
            for layer in self.layers:
                given.append((layer, value.squeeze(0)))
                value = _output(layer, value)
        return given


def scan_chain(layers: nn.Sequential | Sequence[nn.Module]) -> ScanChain:
    """Layers must treat the samples of a batch apart, and none may be random: BatchNorm and Dropout
    in eval only. An nn.Sequential inside of another counts as its layers."""
    chosen = list(_in_one_line(layers))
    if not chosen:
        raise ValueError("scan_chain needs at least one layer")
    return ScanChain(chosen)


def _in_one_line(layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for layer in layers:
        if type(layer) is nn.Sequential:
            yield from _in_one_line(layer)
        else:
            yield layer


def _output(layer: nn.Module, value: Tensor) -> Tensor:
    """What the layer is given stays: its Jacobian is taken there."""
    refused = why_refused(layer)
    if refused:
        raise ValueError(refused)
    output = layer(value.clone() if getattr(layer, "inplace", False) else value)
    if not isinstance(output, torch.Tensor):
        raise ValueError(f"{type(layer).__name__} returns a {type(output).__name__}, not a tensor")
    return output


class _BackwardByScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: ScanChain, inputs: Tensor, *_: Any) -> Tensor:
        values = [inputs]
        for layer in chain.layers:
            values.append(_output(layer, values[-1]))
        ctx.chain = chain
        ctx.save_for_backward(*values)
        return values[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative()
        chain, values = ctx.chain, ctx.saved_tensors
        by_sample = [
            _sample_gradients(chain, [value[place] for value in values[:-1]], gradient[place])
            for place in range(len(gradient))
        ]
        reached = [torch.stack(rows) for rows in zip(*by_sample, strict=True)]  # inputs' first
        reached = reached or [torch.zeros_like(value) for value in values[:-1]]  # no sample
        found: dict[int, Tensor] = {}
        for layer, given, arriving in zip(
            chain.layers, values[:-1], [*reached[1:], gradient], strict=True
        ):
            _add_parameter_gradients(found, layer, given, arriving)
        wanted = [found.get(id(parameter)) for parameter in chain.parameters()]
        return None, reached[0], *wanted


def _sample_gradients(chain: ScanChain, given: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """What reaches the input of each layer, first layer first."""
    pairs = zip(chain.layers, given, strict=True)
    jacobians = [transposed_jacobian(layer, value) for layer, value in pairs]
    columns = _prefixes(gradient.reshape(-1, 1), jacobians, _Products())
    return [column.view(value.shape) for column, value in zip(columns, given, strict=True)]


def _prefixes(
    gradient: Tensor, jacobians: Sequence[Tensor | None], products: _Products
) -> list[Tensor]:
    """The gradient at the input of each layer, first layer first, by an exclusive scan."""
    elements = [gradient, *reversed(jacobians), None]
    scanned = blelloch(elements, products.combine, None, products.begin_level).elements
    return [one for one in reversed(scanned[2:]) if one is not None]


def _add_parameter_gradients(
    found: dict[int, Tensor], layer: nn.Module, given: Tensor, arriving: Tensor
) -> None:
    parameters = [one for one in layer.parameters() if one.requires_grad]
    if not parameters:
        return
    with torch.enable_grad():
        output = _output(layer, given.detach())
        gradients = torch.autograd.grad(output, parameters, arriving)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        found[id(parameter)] = found.get(id(parameter), 0) + gradient
