"""Convolutions whose tensors are in torch's usual layout, which tensor cores do not read."""

from __future__ import annotations

import math

import msgspec

_GROUP_BYTES = 16  # of channels


class ConvolutionLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A dense convolution."""

    place: int  # its node
    inputs: int  # channels
    outputs: int
    strided: bool = False


def filled_up(channels: int, width: int) -> float:
    """A tensor with whole groups of channels, of `width` bytes each, over the tensor as it is."""
    group = max(1, _GROUP_BYTES // width)
    return math.ceil(channels / group) * group / max(1, channels)
