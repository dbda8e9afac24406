"""The transposed Jacobian of one layer at one sample, as a sparse matrix [inputs, outputs].

Where a layer's pattern of zeros is known from what it is, only the rest is ever made: a pixel
reaches the few outputs whose window it is in, a ReLU is a diagonal, a pruned weight is not there.
Other layers get a dense one from autograd; `is_sparse_by_design` tells which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_SAME = (nn.Flatten, nn.Identity, nn.Unflatten)
_DROPOUTS = nn.modules.dropout._DropoutNd
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm
_BY_ELEMENT = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus)


def transposed_jacobian(layer: nn.Module, sample: Tensor) -> Tensor | None:
    """At one sample, without its batch dimension. None: the layer only changes shapes."""
    if isinstance(layer, (*_SAME, _DROPOUTS)):
        return None
    with torch.no_grad():
        made = _maker(layer)(layer, sample)
    return made.coalesce()


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


def is_sparse_by_design(layer: nn.Module) -> bool:
    return isinstance(layer, (*_SAME, _DROPOUTS)) or _maker(layer) is not _by_autograd


def _maker(layer: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    if isinstance(layer, _BY_ELEMENT):
        return _of_elements
    if isinstance(layer, _BATCH_NORMS):  # in eval: a factor a channel
        return _of_elements
    return _MAKERS.get(type(layer), _by_autograd)


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
    return _sparse(
        inputs, outputs, layer.weight[outputs, inputs], (layer.in_features, layer.out_features)
    )


def _of_convolution(layer: nn.Conv2d, sample: Tensor) -> Tensor:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return _by_autograd(layer, sample)
    windows = _windows(sample, layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    inputs_a_group = len(windows) // layer.groups
    outputs, taps = layer.weight.flatten(1).nonzero(as_tuple=True)
    group = outputs // (layer.out_channels // layer.groups)
    values = layer.weight.flatten(1)[outputs, taps]
    return _through_windows(
        windows[group * inputs_a_group + taps], outputs, values, sample.numel(), layer.out_channels
    )


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
