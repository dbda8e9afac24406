"""The elements of a convolution's kernel that ever meet its input.

A kernel of 3 x 3 over one element with a border of one sees eight zeros: only the element in its
middle counts. Deep layers over small pictures are full of such kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class UsefulTaps(NamedTuple):
    """A kernel's elements from `first` to before `end` in each dimension, and the border left."""

    first: tuple[int, ...]
    end: tuple[int, ...]
    padding: tuple[int, ...]

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The part of [models, outputs, inputs, *kernel]."""
        parts = (slice(*pair) for pair in zip(self.first, self.end, strict=True))
        part: torch.Tensor = _KernelPart.apply(weight, (..., *parts))
        return part


class _KernelPart(torch.autograd.Function):
    """One fill and one copy on the way back; torch's own would take them for each dimension."""

    @staticmethod
    def forward(context: Any, whole: torch.Tensor, place: tuple[Any, ...]) -> torch.Tensor:
        context.shape, context.place = whole.shape, place
        return whole[place]

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradients[0].new_zeros(context.shape)
        whole[context.place] = gradients[0]
        return whole, None


def useful_taps(
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: Any,
    padding: Any,
    dilation: Any,
) -> UsefulTaps | None:
    """None if all elements count, or if what is left would need unequal borders."""
    if isinstance(padding, str):
        return None
    steps, borders, gaps = (each_dimension(one, len(sizes)) for one in (stride, padding, dilation))
    facts = list(zip(sizes, kernel, steps, borders, gaps, strict=True))
    found = [_in_one_dimension(*one) for one in facts]
    if all(one == (0, kernel[at]) for at, one in enumerate(found)):
        return None
    left = []
    for (first, end), (size, taps, step, border, gap) in zip(found, facts, strict=True):
        before = border - first * gap
        outputs = (size + 2 * border - (taps - 1) * gap - 1) // step + 1
        needed = (outputs - 1) * step + (end - first - 1) * gap + 1
        # torch's border is the same on both sides; one element more than needed makes no output
        if before < 0 or not needed <= size + 2 * before < needed + step:
            return None
        left.append(before)
    return UsefulTaps(tuple(a for a, _ in found), tuple(b for _, b in found), tuple(left))


def _in_one_dimension(size: int, taps: int, step: int, border: int, gap: int) -> tuple[int, int]:
    outputs = (size + 2 * border - (taps - 1) * gap - 1) // step + 1
    seen = [
        tap
        for tap in range(taps)
        if any(0 <= at * step - border + tap * gap < size for at in range(outputs))
    ]
    return (seen[0], seen[-1] + 1) if seen else (0, taps)


def each_dimension(setting: Any, dimensions: int) -> tuple[int, ...]:
    """`stride=2` and `stride=(2,)` mean every dimension."""
    values = (setting,) if isinstance(setting, int) else tuple(setting)
    return values * dimensions if len(values) == 1 else values
