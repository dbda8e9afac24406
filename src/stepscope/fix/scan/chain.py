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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.fix.scan.affine_maps import refuse_second_derivative


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelCost:
    """Products of one level of the scan, which could run at the same time."""

    products: int
    flops: int
    largest: int  # FLOPs of the most expensive product: the level's part of the critical path


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainAnalysis:
    """The cost of one sample's scan, and of going back layer by layer."""

    densities: tuple[float, ...]  # of each layer's Jacobian, first layer first
    levels: tuple[LevelCost, ...]
    one_by_one: tuple[int, ...]  # FLOPs of each layer's product with the gradient, last layer first


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
        """Count the scan's products for one sample, without its batch dimension."""
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
    """Compute a layer and leave its input as it is: its Jacobian is taken there."""
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
        arriving = [*reached[1:], gradient]
        for layer, given, its_gradient in zip(chain.layers, values[:-1], arriving, strict=True):
            trained = [one for one in layer.parameters() if one.requires_grad]
            if not trained:
                continue
            with torch.enable_grad():
                gradients = torch.autograd.grad(
                    _output(layer, given.detach()), trained, its_gradient
                )
            for parameter, own in zip(trained, gradients, strict=True):
                found[id(parameter)] = found.get(id(parameter), 0) + own
        wanted = [found.get(id(parameter)) for parameter in chain.parameters()]
        return None, reached[0], *wanted


def _sample_gradients(chain: ScanChain, given: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """Return what reaches the input of each layer, first layer first."""
    pairs = zip(chain.layers, given, strict=True)
    jacobians = [transposed_jacobian(layer, value) for layer, value in pairs]
    columns = _prefixes(gradient.reshape(-1, 1), jacobians, _Products())
    return [column.view(value.shape) for column, value in zip(columns, given, strict=True)]


def _prefixes(
    gradient: Tensor, jacobians: Sequence[Tensor | None], products: _Products
) -> list[Tensor]:
    """The gradient at the input of each layer, first layer first, by an exclusive scan."""
    elements = [gradient, *reversed(jacobians), None]
    scanned = blelloch(elements, products.combine, None, products.begin_level)
    return [one for one in reversed(scanned[2:]) if one is not None]


# The transposed Jacobian of one layer at one sample, as a sparse matrix [inputs, outputs].
#
# Where a layer's pattern of zeros is known from what it is, only the rest is ever made: a pixel
# reaches the few outputs whose window it is in, a ReLU is a diagonal, a pruned weight is not there.
# Other layers get a dense one from autograd.

_SAME = (nn.Flatten, nn.Identity, nn.Unflatten)
_DROPOUTS = nn.modules.dropout._DropoutNd
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm
_BY_ELEMENT = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus)


def transposed_jacobian(layer: nn.Module, sample: Tensor) -> Tensor | None:
    """At one sample, without its batch dimension. None: the layer only changes shapes."""
    if isinstance(layer, (*_SAME, _DROPOUTS)):
        return None
    jacobian = _MAKERS.get(type(layer), _by_autograd)
    if isinstance(layer, (*_BY_ELEMENT, _BATCH_NORMS)):  # BatchNorm in eval: a factor a channel
        jacobian = _of_elements
    with torch.no_grad():
        return jacobian(layer, sample).coalesce()


def why_refused(layer: nn.Module) -> str | None:
    """Why this layer, as it is set now, has no Jacobian of a single sample."""
    name, batch_norm = type(layer).__name__, isinstance(layer, _BATCH_NORMS)
    if batch_norm and (layer.training or layer.running_mean is None):
        return f"{name} mixes the samples of a batch. Call eval() on it, or fold it into a neighbor"
    if layer.training and isinstance(layer, (_DROPOUTS, nn.RReLU)):
        return f"{name} is random in training. Call eval() on it, or leave it out of the chain"
    if isinstance(layer, nn.Flatten) and layer.start_dim == 0:
        return f"{name} with start_dim=0 mixes the samples of a batch"
    return None


def _of_elements(layer: nn.Module, sample: Tensor) -> Tensor:
    with torch.enable_grad():
        given = sample.detach().requires_grad_()
        outputs = layer(given.clone().unsqueeze(0))
        (slopes,) = torch.autograd.grad(outputs.sum(), given)
    places = slopes.flatten().nonzero().squeeze(1)
    return _sparse(places, places, slopes.flatten()[places], (sample.numel(), sample.numel()))


def _of_linear(layer: nn.Linear, sample: Tensor) -> Tensor:
    if sample.dim() != 1:
        return _by_autograd(layer, sample)
    outputs, inputs = layer.weight.nonzero(as_tuple=True)
    shape = (layer.in_features, layer.out_features)
    return _sparse(inputs, outputs, layer.weight[outputs, inputs], shape)


def _of_convolution(layer: nn.Conv2d, sample: Tensor) -> Tensor:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return _by_autograd(layer, sample)
    windows = _windows(sample, layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    inputs_a_group = len(windows) // layer.groups
    outputs, taps = layer.weight.flatten(1).nonzero(as_tuple=True)
    group = outputs // (layer.out_channels // layer.groups)
    values, seen = layer.weight.flatten(1)[outputs, taps], windows[group * inputs_a_group + taps]
    return _through_windows(seen, outputs, values, sample.numel(), layer.out_channels)


def _of_average(layer: nn.AvgPool2d, sample: Tensor) -> Tensor:
    size = _pair(layer.kernel_size)
    if _pair(layer.padding) != (0, 0) or layer.ceil_mode or layer.divisor_override:
        return _by_autograd(layer, sample)
    windows = _windows(sample, size, layer.stride or size, (0, 0), (1, 1))
    channels = sample.shape[0]
    outputs = torch.arange(channels, device=sample.device).repeat_interleave(size[0] * size[1])
    values = sample.new_full((len(windows),), 1 / (size[0] * size[1]))
    return _through_windows(windows, outputs, values, sample.numel(), channels)


def _of_maximum(layer: nn.MaxPool2d, sample: Tensor) -> Tensor:
    _, chosen = functional.max_pool2d(
        sample, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode,
        return_indices=True,
    )  # fmt: skip
    channels, height, width = sample.shape
    first = torch.arange(channels, device=sample.device).view(-1, 1, 1) * (height * width)
    inputs = (chosen + first).flatten()
    outputs = torch.arange(len(inputs), device=sample.device)
    ones = sample.new_ones(len(inputs))
    return _sparse(inputs, outputs, ones, (sample.numel(), len(inputs)))


def _by_autograd(layer: nn.Module, sample: Tensor) -> Tensor:
    def outputs(given: Tensor) -> Tensor:
        return layer(given.unsqueeze(0)).squeeze(0).flatten()

    with torch.enable_grad():
        jacobian = torch.autograd.functional.jacobian(outputs, sample.detach())
    return jacobian.flatten(1).t().to_sparse()


_MAKERS: dict[type, Callable[[Any, Tensor], Tensor]] = {
    nn.Linear: _of_linear,
    nn.Conv2d: _of_convolution,
    nn.AvgPool2d: _of_average,
    nn.MaxPool2d: _of_maximum,
}


def _windows(sample: Tensor, size: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """[taps of all channels, windows]: which input each tap of each window sees; -1 for padding."""
    numbers = torch.arange(1, sample.numel() + 1, dtype=torch.float64, device=sample.device)
    seen = functional.unfold(
        numbers.view(1, *sample.shape), size, dilation=dilation, padding=padding, stride=stride
    )
    return seen[0].long() - 1


def _through_windows(
    windows: Tensor, outputs: Tensor, values: Tensor, inputs: int, channels: int
) -> Tensor:
    """One row of `windows`, output channel and value for each connection."""
    count = windows.shape[1]
    places = torch.arange(count, device=windows.device)
    columns = outputs.unsqueeze(1) * count + places
    inside = windows >= 0
    spread = values.unsqueeze(1).expand_as(windows)
    return _sparse(windows[inside], columns[inside], spread[inside], (inputs, channels * count))


def _sparse(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    places = torch.stack([rows, columns])
    return torch.sparse_coo_tensor(places, values, shape, check_invariants=True)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


# Every prefix of a list combined by an associative operation, in 2 log n levels.

Element = TypeVar("Element")


def blelloch(
    elements: Sequence[Element],
    combine: Callable[[Element, Element], Element],
    identity: Element,
    begin_level: Callable[[], object],
) -> list[Element]:
    """Every prefix without its last element: the first is `identity`.

    On the way up, pairs are combined into a tree of sums. On the way down, each node hands what is
    left of it to its left child, and that with the left child's sum to its right one. `combine`
    gets the earlier element first; `begin_level` is called before the combinations that could run
    at the same time.
    """
    length = 1 << max(0, len(elements) - 1).bit_length()
    tree = [*elements, *[identity] * (length - len(elements))]
    width = 2
    while width <= length:
        begin_level()
        for right in range(width - 1, length, width):
            tree[right] = combine(tree[right - width // 2], tree[right])
        width *= 2
    tree[-1] = identity
    while width > 2:
        width //= 2
        begin_level()
        for right in range(width - 1, length, width):
            left = right - width // 2
            tree[left], tree[right] = tree[right], combine(tree[right], tree[left])
    return tree[: len(elements)]
