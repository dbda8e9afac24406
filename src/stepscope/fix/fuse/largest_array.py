"""How many models fit into one array, before any of them trains.

Copies of one model train two steps as arrays of one, two and four. Weights, gradients, optimizer
states and activations grow with the number of models; a library's workspaces do not. What the
steps between them show is the straight line, and how far it can be trusted.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.fix.fuse.array import fuse
from stepscope.fix.memory_meters import allocatable_bytes, is_out_of_memory, meter_on
from stepscope.fix.random_states import restore, states_now

_TRIED = (1, 2, 4)  # models
_STEPS = 2  # the first makes the optimizer's state, the second trains with it
_FRAGMENTS = 0.08  # of the memory: what an allocator may be unable to use
_MOST = 4096  # nobody trains more at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFit:
    """The largest array that fits into `memory_bytes`."""

    models: int
    low: int  # at least so many will fit
    high: int  # and at most so many
    fixed_bytes: int  # whatever the number of models
    model_bytes: int  # that each model adds
    memory_bytes: int


def largest_array(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any],
    *inputs: Any,
    memory: int | None = None,
) -> ArrayFit:
    """Find how many such models fit into memory together.

    `loss(model, *inputs)` is one model's; `memory` in bytes is else all that is free.

    The model, its optimizer and torch's random numbers stay as they are.
    """
    device = next(model.parameters()).device
    limit = allocatable_bytes(device) if memory is None else memory
    if limit <= 0:
        raise UsageError(f"memory={limit}: give the bytes that the fused models may take")
    peaks: dict[int, int] = {}
    for count in _TRIED:
        if count > 2 and _line(peaks)[0] + count * _line(peaks)[1] > limit:
            break
        if device.type == "cpu" and torch.autograd._profiler_enabled():
            raise UsageError(
                "the memory of fused models cannot be measured while a profiler records"
            )
        random = states_now()
        train = partial(_train_copies, count, model, optimizer, loss, inputs)
        try:
            peaks[count] = int(meter_on(device)(train)[1])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
        finally:
            restore(random)
            gc.collect()
    return fit_line(peaks, limit)


def fit_line(peaks: dict[int, int], limit: int) -> ArrayFit:
    """From peaks by number of models; none or one of them: the next did not fit."""
    if len(peaks) < 2:
        fits, model_bytes = int(bool(peaks) and peaks[1] <= limit), peaks.get(1, 0)
        return ArrayFit(
            models=fits,
            low=fits,
            high=fits,
            fixed_bytes=0,
            model_bytes=model_bytes,
            memory_bytes=limit,
        )

    def fitting(limit: int, fixed: int, slope: int) -> int:
        return min(_MOST, max(0, (limit - fixed) // slope))

    fixed, slope = _line(peaks)
    slopes = _slopes(peaks)
    models = fitting(limit, fixed, slope)
    return ArrayFit(
        models=models,
        low=min(models, fitting(int(limit * (1 - _FRAGMENTS)), fixed, max(slopes))),
        high=max(models, fitting(limit, min(0, fixed), min(slopes))),
        fixed_bytes=max(0, fixed),
        model_bytes=slope,
        memory_bytes=limit,
    )


def _line(peaks: dict[int, int]) -> tuple[int, int]:
    """Bytes without a model, and of each: through the last two."""
    last = max(peaks)
    slope = _slopes(peaks)[-1]
    return peaks[last] - last * slope, slope


def _slopes(peaks: dict[int, int]) -> list[int]:
    counts = sorted(peaks)
    return [max(1, round((peaks[b] - peaks[a]) / (b - a))) for a, b in itertools.pairwise(counts)]


def _train_copies(
    count: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any],
    inputs: Sequence[Any],
) -> None:
    models, optimizers = zip(
        *(copy.deepcopy((model, optimizer)) for _ in range(count)), strict=True
    )
    array = fuse(models, optimizers)
    batches = [
        [one.clone() for _ in range(count)] if isinstance(one, torch.Tensor) else one
        for one in inputs
    ]
    for _ in range(_STEPS):
        losses = array.apply_each(partial(loss, array), *batches)
        array.zero_grad()
        array.backward(losses)
        del losses
        array.step()
