"""Convolutions, plain and transposed: one with a group, or groups, for each model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from stepscope.fix.fuse.kernel_choice import WayToChoose, chooser
from stepscope.fix.fuse.rules.convolution_products import (
    LAST,
    as_filters,
    channels_last,
    convolve_unfolded,
    each_dimension,
    pointwise_product,
    precision_of_autocast,
    product_in_channels,
    shared_product,
    useful_taps,
)
from stepscope.fix.fuse.rules.registry import front_of, rest_of, rule_for
from stepscope.fix.fuse.stacked import Layout, Stacked

_HALVES = (torch.bfloat16, torch.float16)
_FOR_POINTS = ("product", "product, channels last")
_NOT_FOR_POINTS = ("unfolded", "unfolded, rows kept")


@rule_for("conv1d", "conv2d", "conv3d")
def convolve(
    func: Any, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if not isinstance(weight, Stacked) or input.dim() != weight.dim():
        return NotImplemented
    *sizes, groups = rest_of(args, kwargs, stride=1, padding=0, dilation=1, groups=1)
    stride, padding, dilation = (tuple(one) if isinstance(one, list) else one for one in sizes)
    count = weight.count
    shared = input if not isinstance(input, Stacked) else input.common
    order: Layout = "front" if shared is not None else input.order
    filters = weight.front()
    taps = useful_taps(input.shape[2:], weight.shape[2:], stride, padding, dilation)
    if taps is not None:
        filters, padding = taps.of(filters), taps.padding
    call = _Convolution(func, count, shared is not None, order, stride, padding, dilation, groups)
    tensors = [shared if shared is not None else input.physical, filters]
    if bias is not None:
        tensors.append(front_of(bias, count))
    way = chooser().pick(call.operator(tensors))
    return call.ways()[way](*tensors)


class _Convolution(NamedTuple):
    """One call, and the ways to compute it: of pictures, [models, ...] weights and biases."""

    func: Any
    models: int
    shared: bool  # one batch for all models
    order: Layout  # of pictures that are not shared
    stride: Any
    padding: Any
    dilation: Any
    groups: int

    def ways(self) -> dict[str, Callable[..., Stacked]]:
        known: dict[str, Callable[..., Stacked]] = {"grouped": self._grouped}
        if self.func.__name__ != "conv1d":
            known["grouped, channels last"] = self._grouped_last
        known["product"] = self._product
        if self.func.__name__ != "conv1d" and not self.shared:
            known["product, channels last"] = self._product_last
        if self.groups == 1 and not self.shared and not isinstance(self.padding, str):
            known["unfolded"] = self._unfolded
            known["unfolded, rows kept"] = partial(self._unfolded, keep_rows=True)
        known["one by one"] = self._one_by_one
        return known

    def operator(self, tensors: list[torch.Tensor]) -> WayToChoose:
        """Describe this call to the chooser."""
        pictures, weight = tensors[:2]
        one = all(size == 1 for size in weight.shape[3:])
        pointwise = one and self.groups == 1 and _is_zero(self.padding)

        def ways() -> dict[str, Callable[..., torch.Tensor]]:
            return {
                name: partial(self._as_the_next_takes_it, pointwise, way)
                for name, way in self.ways().items()
                if name not in (_NOT_FOR_POINTS if pointwise else _FOR_POINTS)
            }

        def work() -> int:  # outputs of one element's worth of inputs, at most
            return int(pictures.numel() * weight[0, :, 0].numel())

        usual = self._usual(pictures, pointwise)
        return WayToChoose(self.func.__name__, tensors, self[1:], usual, ways, work)

    def _usual(self, pictures: torch.Tensor, pointwise: bool) -> str:
        is_flat = self.func.__name__ == "conv1d"
        is_last = not is_flat and _is_half_on_cuda(pictures)
        if pointwise and (self.shared or self.order == "front" or is_flat):
            return "product"
        if is_last:
            return "product, channels last" if pointwise else "grouped, channels last"
        return "grouped"

    def _as_the_next_takes_it(
        self, pointwise: bool, way: Callable[..., Stacked], *tensors: torch.Tensor
    ) -> torch.Tensor:
        """A way's result in the layout that norms, pools and convolutions after it take."""
        made, given = way(*tensors), tensors[0]
        if not pointwise and self.func.__name__ != "conv1d" and _is_half_on_cuda(given):
            return made.channels().contiguous(memory_format=LAST[given.dim() - self._in_front()])
        if self.shared:
            return made.physical
        if self.order == "front":
            front = made.front().transpose(1, 2) if pointwise else made.channels()
            return front.contiguous()
        if given.dim() > 3 and not given.is_contiguous():
            return made.channels().contiguous(memory_format=LAST[given.dim()])
        return made.channels().contiguous()

    def _in_front(self) -> bool:
        """Whether pictures have a dimension for the models."""
        return not self.shared and self.order == "front"

    def _channels(self, pictures: torch.Tensor) -> tuple[torch.Tensor, int]:
        """[batch, channels of all models, ...] and the groups. A batch that all models share needs
        no groups: all their filters see the same channels."""
        if not self.shared:
            given = Stacked(pictures, self.models, self.order)
            return given.channels(), self.groups * self.models
        if self.groups == 1:
            return pictures, 1
        return Stacked.share(pictures, self.models).channels(), self.groups * self.models

    def _grouped(self, pictures: Any, weight: Any, bias: Any = None, last: bool = False) -> Stacked:
        given, groups = self._channels(pictures)
        if last:
            given = given.contiguous(memory_format=LAST[given.dim()])
            filters = as_filters(channels_last(weight, precision_of_autocast(weight)))
        else:
            filters = weight.flatten(0, 1)
        flat = None if bias is None else bias.reshape(-1)
        made = self.func(given, filters, flat, self.stride, self.padding, self.dilation, groups)
        return Stacked(made, self.models, "channel")

    def _grouped_last(self, pictures: Any, weight: Any, bias: Any = None) -> Stacked:
        return self._grouped(pictures, weight, bias, last=True)

    def _product(self, pictures: Any, weight: Any, bias: Any = None) -> Stacked:
        if self.shared:
            return Stacked(shared_product(self._strided(pictures), weight, bias), self.models)
        front = Stacked(pictures, self.models, self.order).front()
        return Stacked(pointwise_product(self._strided(front), weight, bias), self.models)

    def _product_last(self, pictures: Any, weight: Any, bias: Any = None) -> Stacked:
        given, _ = self._channels(pictures)
        made = product_in_channels(self._strided(given), weight, bias)
        return Stacked(made, self.models, "channel")

    def _unfolded(
        self, pictures: Any, weight: Any, bias: Any = None, keep_rows: bool = False
    ) -> Stacked:
        if self._in_front():  # [models, batch, channels, *sizes]
            last = pictures.permute(1, *range(3, pictures.dim()), 0, 2)
        else:
            last = pictures.movedim(1, -1).unflatten(-1, (self.models, -1))
        settings = (self.stride, self.padding, self.dilation, keep_rows)
        return Stacked(convolve_unfolded(last, weight, bias, *settings), self.models, "channel")

    def _one_by_one(self, pictures: Any, weight: Any, bias: Any = None) -> Stacked:
        given: Any = [pictures] * self.models
        if not self.shared:
            given = Stacked(pictures, self.models, self.order).each()
        settings = (self.stride, self.padding, self.dilation, self.groups)
        made = [
            self.func(own, weight[model], None if bias is None else bias[model], *settings)
            for model, own in enumerate(given)
        ]
        return Stacked(torch.stack(made), self.models)

    def _strided(self, pictures: torch.Tensor) -> torch.Tensor:
        """Only the elements that a kernel of one element sees."""
        strides = each_dimension(self.stride, int(self.func.__name__[-2]))
        if all(one == 1 for one in strides):
            return pictures
        return pictures[(..., *(slice(None, None, one) for one in strides))]


def _is_zero(padding: Any) -> bool:
    if isinstance(padding, str):  # "same" adds nothing to a kernel of one element
        return True
    return not any(padding) if isinstance(padding, tuple | list) else not padding


def _is_half_on_cuda(pictures: torch.Tensor) -> bool:
    """Where convolutions are fastest with channels last."""
    if pictures.device.type != "cuda":
        return False
    return pictures.dtype in _HALVES or torch.is_autocast_enabled("cuda")


@rule_for("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolve_transposed(
    func: Any, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if not isinstance(weight, Stacked) or input.dim() != weight.dim():
        return NotImplemented
    stride, padding, output_padding, groups, dilation = rest_of(
        args, kwargs, stride=1, padding=0, output_padding=0, groups=1, dilation=1
    )
    count, own = weight.count, weight.front()
    flat = None if bias is None else front_of(bias, count).reshape(-1)
    given = input if isinstance(input, Stacked) else Stacked.share(input, count)
    pictures = given.channels()
    settings = (stride, padding, output_padding, groups * count, dilation)
    if pictures.dim() == 3 or not _is_half_on_cuda(pictures):
        return Stacked(func(pictures, own.flatten(0, 1), flat, *settings), count, "channel")
    pictures = pictures.contiguous(memory_format=LAST[pictures.dim()])
    filters = as_filters(channels_last(own, precision_of_autocast(own)))
    made = convolve_transposed_last(func, pictures, filters, flat, *settings)
    return Stacked(made, count, "channel")


@rule_for("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
def shuffle(func: Any, input: Any, factor: int) -> Any:
    """Each model's channels lie together and are a multiple of the factor's square."""
    if input.dim() != 4 or func.__name__ == "channel_shuffle":
        return NotImplemented
    return Stacked(func(input.channels(), factor), input.count, "channel")


@rule_for("interpolate", "upsample")
def resize(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    if input.dim() < 3:
        return NotImplemented
    return Stacked(func(input.channels(), *args, **kwargs), input.count, "channel")


@rule_for("pad")
def pad(func: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    spatial = len(pad) // 2
    if input.order == "channel" and spatial <= input.dim() - 2:
        return Stacked(func(input.physical, pad, mode, value), input.count, "channel")
    if mode != "constant":
        if spatial > input.dim() - 2 or input.dim() < 3:
            return NotImplemented
        return Stacked(func(input.channels(), pad, mode, value), input.count, "channel")
    return Stacked(func(input.front(), pad, mode, value), input.count)


@rule_for("unfold")
def unfold(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    if func.__module__ != "torch.nn.functional" or input.dim() != 4:
        return NotImplemented
    return Stacked(func(input.channels(), *args, **kwargs), input.count, "channel")


# Transposed convolutions with channels last: their gradients lie as the compiler expects.
#
# torch's compiler is told a layout for the gradients of a transposed convolution that cuDNN does
# not always give (pytorch issues 171622 and 197517): compiled backward passes then end with an
# error. While a step is compiled, the gradients are computed by an operator that always gives this
# layout.


def convolve_transposed_last(
    func: Any,
    pictures: torch.Tensor,
    filters: torch.Tensor,
    bias: torch.Tensor | None,
    *settings: Any,
) -> torch.Tensor:
    """Compute `func` of pictures and filters with channels last."""
    if not torch.compiler.is_compiling():
        made: torch.Tensor = func(pictures, filters, bias, *settings)
        return made
    # The cast is autocast's. A bias that is added here is compiled with what comes after it.
    made = _Transposed.apply(func, pictures.to(filters.dtype), filters, settings)
    if bias is not None:
        made = made + bias.to(made.dtype).view(-1, *[1] * (made.dim() - 2))
    return made


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, func: Any, pictures: torch.Tensor, filters: torch.Tensor, settings: Any
    ) -> torch.Tensor:
        context.save_for_backward(pictures, filters)
        context.settings = settings
        made: torch.Tensor = func(pictures, filters, None, *settings)
        return made

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        pictures, filters = context.saved_tensors
        stride, padding, output_padding, groups, dilation = context.settings
        lists = (
            list(each_dimension(one, pictures.dim() - 2))
            for one in (stride, padding, output_padding, dilation)
        )
        wanted = list(context.needs_input_grad[1:3])
        made = transposed_gradients(gradients[0], pictures, filters, *lists, groups, wanted)
        own = (one if is_wanted else None for one, is_wanted in zip(made, wanted, strict=True))
        return None, *own, None


def _gradients(
    gradient: torch.Tensor, pictures: torch.Tensor, filters: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of pictures and filters; an empty tensor where one is not wanted."""
    stride, padding, output_padding, dilation, groups, wanted = given
    settings = (stride, padding, dilation, True, output_padding, groups, [*wanted, False])
    made = torch.ops.aten.convolution_backward(gradient, pictures, filters, None, *settings)
    of_pictures, of_filters = (
        _laid_out(one, like) if is_wanted else like.new_empty(0)
        for one, like, is_wanted in zip(made[:2], (pictures, filters), wanted, strict=True)
    )
    return of_pictures, of_filters


def _as_told(
    gradient: torch.Tensor, pictures: torch.Tensor, filters: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results, for the compiler; `wanted` comes last."""
    of_pictures, of_filters = (
        _channels_last_like(like) if is_wanted else like.new_empty(0)
        for like, is_wanted in zip((pictures, filters), rest[-1], strict=True)
    )
    return of_pictures, of_filters


def _laid_out(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """To the last stride: `contiguous` takes any for dimensions of one element."""
    target = _channels_last_like(like)
    return made if made.stride() == target.stride() else target.copy_(made)


def _channels_last_like(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=LAST[like.dim()])


transposed_gradients: Any = torch.library.custom_op(
    "stepscope::transposed_gradients",
    _gradients,
    mutates_args=(),
    schema=(
        "(Tensor gradient, Tensor pictures, Tensor filters, SymInt[] stride, SymInt[] padding, "
        "SymInt[] output_padding, SymInt[] dilation, SymInt groups, bool[] wanted) "
        "-> (Tensor, Tensor)"
    ),
)
transposed_gradients.register_fake(_as_told)
