"""The element-wise linear recurrence as Triton kernels: fold chunks, join them, replay.

A thread has one element of the state and walks along the steps, so neighbours read neighbours. The
inputs are read twice and the states written once; between the two only one pair a chunk is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK, _WIDTH = 64, 128


@triton.jit
def _fold(decay, inputs, decays_out, states_out, steps, width, chunk, WIDTH: tl.constexpr):
    group = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < width
    product = tl.full([WIDTH], 1.0, tl.float32)
    state = tl.zeros([WIDTH], tl.float32)
    first = group * chunk
    here = first.to(tl.int64) * width + columns
    for _ in range(first, tl.minimum(first + chunk, steps)):
        a = tl.load(decay + here, mask=inside, other=0.0)
        state = a * state + tl.load(inputs + here, mask=inside, other=0.0)
        product = product * a
        here += width
    there = group.to(tl.int64) * width + columns
    tl.store(decays_out + there, product, mask=inside)
    tl.store(states_out + there, state, mask=inside)


@triton.jit
def _replay(decay, inputs, entering, states, steps, width, chunk, WIDTH: tl.constexpr):
    group = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < width
    state = tl.load(entering + group.to(tl.int64) * width + columns, mask=inside, other=0.0)
    first = group * chunk
    here = first.to(tl.int64) * width + columns
    for _ in range(first, tl.minimum(first + chunk, steps)):
        a = tl.load(decay + here, mask=inside, other=0.0)
        state = a * state + tl.load(inputs + here, mask=inside, other=0.0)
        tl.store(states + here, state, mask=inside)
        here += width


def scan_pairs(decay: Tensor, inputs: Tensor) -> Tensor:
    """All states from a state of zero; both are [steps, ...] and contiguous."""
    steps, width = len(inputs), inputs[0].numel()
    chunks, blocks = triton.cdiv(steps, _CHUNK), triton.cdiv(width, _WIDTH)
    decay, inputs = decay.contiguous(), inputs.contiguous()
    states = torch.empty_like(inputs)
    entering = inputs.new_zeros(chunks, width)
    if chunks > 1:
        decays, ends = inputs.new_empty(chunks, width), inputs.new_empty(chunks, width)
        _fold[chunks, blocks](
            decay, inputs, decays, ends, steps, width, _CHUNK, WIDTH=_WIDTH, num_warps=4
        )
        entering[1:] = scan_pairs(decays, ends)[:-1]
    _replay[chunks, blocks](
        decay, inputs, entering, states, steps, width, _CHUNK, WIDTH=_WIDTH, num_warps=4
    )
    return states
