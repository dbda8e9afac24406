"""Filters to and from channels last, with a cast, in one pass that reads and writes whole lines.

torch's copy reads one kernel element of each input at a time, which moves every line of memory as
often as the kernel has elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 2048  # numbers that one program moves
_MOST_TAPS = 128
_PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _exchange(
    source, target, inputs, taps, source_input, source_tap, target_input, target_tap,
    INPUTS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * inputs * taps
    place = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)[:, None]
    tap = tl.arange(0, TAPS)[None, :]
    here = (place < inputs) & (tap < taps)
    values = tl.load(source + begin + place * source_input + tap * source_tap, mask=here)
    there = target + begin + place * target_input + tap * target_tap
    tl.store(there, values.to(target.dtype.element_ty), mask=here)


def can_exchange(source: torch.Tensor, target: torch.dtype, taps: int) -> bool:
    """Whether one pass over memory is won: kernels of one element are cast where they are."""
    known = source.dtype in _PRECISIONS and target in _PRECISIONS
    return known and source.is_contiguous() and 1 < taps <= _MOST_TAPS and source.numel() > 0


def channels_last(weight: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    """[models, outputs, inputs, *kernel] -> [models, outputs, *kernel, inputs]."""
    models, outputs, inputs, *kernel = weight.shape
    made = torch.empty((models, outputs, *kernel, inputs), dtype=precision, device=weight.device)
    taps = weight[0, 0, 0].numel()
    _launch(weight, made, inputs, taps, (taps, 1), (1, inputs))
    return made


def channels_first(arranged: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    """[models, outputs, *kernel, inputs] -> [models, outputs, inputs, *kernel]."""
    models, outputs, *kernel, inputs = arranged.shape
    made = torch.empty((models, outputs, inputs, *kernel), dtype=precision, device=arranged.device)
    taps = arranged[0, 0, ..., 0].numel()
    _launch(arranged, made, inputs, taps, (1, inputs), (taps, 1))
    return made


def _launch(
    source: torch.Tensor,
    target: torch.Tensor,
    inputs: int,
    taps: int,
    from_strides: tuple[int, int],
    to_strides: tuple[int, int],
) -> None:
    room = triton.next_power_of_2(taps)
    width = max(8, min(triton.next_power_of_2(inputs), _TILE // room))
    grid = (source.shape[0] * source.shape[1], triton.cdiv(inputs, width))
    strides = (*from_strides, *to_strides)
    with torch.cuda.device_of(source):
        _exchange[grid](source, target, inputs, taps, *strides, INPUTS=width, TAPS=room)


def agrees(device: torch.device) -> bool:
    """Both directions give torch's own numbers. Interpreted, bfloat16 is rounded in another way."""
    draw = torch.Generator(device).manual_seed(0)
    weight = torch.randn(2, 3, 37, 3, 3, device=device, generator=draw)
    for precision, off in ((torch.float16, 0.0), (torch.bfloat16, 2.0**-7)):
        made = channels_last(weight, precision)
        if not torch.allclose(made, weight.movedim(2, -1).to(precision), rtol=off, atol=0.0):
            return False
        if not torch.equal(channels_first(made, torch.float32), made.float().movedim(-1, 2)):
            return False
    return True
