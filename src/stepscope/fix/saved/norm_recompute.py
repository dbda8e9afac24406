"""Compute a norm's result once more from its input and the statistics that backward keeps
anyway, and try which cheaper ways are right to the last bit.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stepscope.fix.saved.encodings.encoded import kernels_for
from stepscope.fix.saved.operators import (
    BATCH_NORMS,
    TRAINING_PLACE,
    OperatorClock,
    plain_name,
    repeatable_arguments,
)

# One pass over the input, where the norm itself takes two or three; a sum and an activation that
# follow are done in the same pass. In which order a library multiplies and adds differs from kernel
# to kernel: trials find the form that is right to the last bit.

FUSED = "fused"  # with the norm before it
# Backward reads their results, so nobody asks for what they started from.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.Tensor.relu_,
    "tanh": torch.Tensor.tanh_,
    "sigmoid": torch.Tensor.sigmoid_,
}
_BATCH, _GROUP, _LAYER = "batch", "group", "layer"
_KINDS = {"native_group_norm": _GROUP, "native_layer_norm": _LAYER} | dict.fromkeys(
    BATCH_NORMS, _BATCH
)
WEIGHT_PLACES = {_BATCH: (1, 2), _GROUP: (1, 2), _LAYER: (2, 3)}  # among the arguments
_IN_TORCH = ("shift", "apart")
_IN_KERNELS = ("weighted", "scaled", "centred", "shift", "apart")
# A statistic is kept for good: for fewer elements than this it is not worth it.
_LEAST_PER_STATISTIC = 32
# Torch's layer norm takes one pass, too, and half as long again. A Triton kernel costs the host 15
# microseconds more than it (H200): so long takes the difference for these bytes.
_LEAST_LAYER_BYTES = 48 << 20


@dataclass(frozen=True, slots=True)
class NormInputs:
    """What the result is had from: the norm's input, its weight and bias, the mean and the inverse
    of the deviation."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    mean: torch.Tensor
    inverse: torch.Tensor


@dataclass(frozen=True, slots=True)
class NormForm:
    """Of which kind the norm is, and in which order it multiplies and adds."""

    kind: str
    order: str

    @property
    def name(self) -> str:
        return self.order if self.kind == _BATCH else f"{self.kind} {self.order}"


@functools.cache
def form_named(name: str) -> NormForm:
    kind, _, order = name.rpartition(" ")
    return NormForm(kind or _BATCH, order)


@dataclass(frozen=True, slots=True)
class _NormRows:
    """Neighbours in memory have different weights; statistics are the columns' or the rows'."""

    by_column: bool


@dataclass(frozen=True, slots=True)
class _NormPlanes:
    """So many neighbours in memory share a channel; where `share` is known, as many channels of
    one sample share their statistics."""

    inner: int
    share: int | None


def normalised(
    form: str,
    inputs: NormInputs,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """The norm's result, plus `residual`, through an activation."""
    known = form_named(form)
    if kernels_for(inputs.x, "norm_kernels") is None:
        made = _in_torch(known, inputs)
    elif residual is None or lies_like(residual, inputs.x):
        return _in_one_kernel(known, inputs, residual, activation)
    else:
        made = _in_one_kernel(known, inputs, None, None)
    if residual is not None:
        made = made + residual
    return made if activation is None else ACTIVATIONS[activation](made)


def norm_inputs(func: Any, args: Any, result: Any) -> tuple[str, NormInputs] | None:
    """The kind of norm and its inputs: in training, with weight and bias, in an order of memory
    that is known here. None of anything else."""
    kind = _KINDS.get(plain_name(func))
    if kind is None or (
        kind == _BATCH and not (len(args) > TRAINING_PLACE and bool(args[TRAINING_PLACE]))
    ):
        return None
    weight, bias = (args[place] if place < len(args) else None for place in WEIGHT_PLACES[kind])
    if weight is None or bias is None:
        return None
    inputs = NormInputs(args[0], weight, bias, result[1], result[2])
    if kind != _BATCH and inputs.mean.numel() * _LEAST_PER_STATISTIC > inputs.x.numel():
        return None
    return None if _layout(kind, inputs) is None else (kind, inputs)


def orders_for(kind: str, inputs: NormInputs) -> tuple[str, ...]:
    """The orders that are worth trying."""
    x = inputs.x
    if kind == _LAYER and (x.device.type == "cpu" or x.nbytes < _LEAST_LAYER_BYTES):
        return ()
    if kernels_for(x, "norm_kernels") is not None:
        return _IN_KERNELS
    return _IN_TORCH if x.device.type == "cpu" else ()


def needed_again(func: Any, args: Any, result: Any) -> tuple[torch.Tensor, ...]:
    """What repeating the operator needs beside its inputs."""
    found = norm_inputs(func, args, result)
    return () if found is None else (found[1].mean, found[1].inverse)


def lies_like(other: torch.Tensor, x: torch.Tensor) -> bool:
    layouts = [(one.shape, one.stride(), one.dtype) for one in (other, x)]
    return bool(layouts[0] == layouts[1])


def _layout(kind: str, inputs: NormInputs) -> _NormRows | _NormPlanes | None:
    """None where memory has gaps or another order, or where numbers do not fit."""
    x, statistics = inputs.x, inputs.mean.numel()
    if not x.numel() or x.dim() < 2 or inputs.inverse.numel() != statistics:
        return None
    if kind == _LAYER:
        whole = x.is_contiguous() and statistics * inputs.weight.numel() == x.numel()
        return _NormRows(by_column=False) if whole else None
    if inputs.weight.numel() != x.shape[1]:
        return None
    inner = _inner_size(x)
    if kind == _BATCH:
        if inner is None or statistics != x.shape[1]:
            return None
        return _NormRows(by_column=True) if inner == 1 else _NormPlanes(inner, None)
    planes = x.shape[0] * x.shape[1]
    return _NormPlanes(inner, planes // statistics) if inner and x.is_contiguous() else None


def _inner_size(x: torch.Tensor) -> int | None:
    """Neighbours in memory that share a channel; None where memory has gaps or another order."""
    if x.is_contiguous():
        return int(x.numel() // (x.shape[0] * x.shape[1]))
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    fitting = formats.get(x.dim())
    return 1 if fitting is not None and x.is_contiguous(memory_format=fitting) else None


def _in_one_kernel(
    form: NormForm, inputs: NormInputs, residual: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    kernels, layout = kernels_for(inputs.x, "norm_kernels"), _layout(form.kind, inputs)
    tensors = inputs.x, inputs.weight, inputs.bias, inputs.mean, inputs.inverse
    made: torch.Tensor
    if isinstance(layout, _NormRows):
        made = kernels.normalise_rows(
            form.order,
            tensors,
            by_column=layout.by_column,
            residual=residual,
            activation=activation,
        )
        return made
    assert layout is not None
    made = kernels.normalise_planes(
        form.order,
        tensors,
        inner=layout.inner,
        share=layout.share,
        residual=residual,
        activation=activation,
    )
    return made


def _in_torch(form: NormForm, inputs: NormInputs) -> torch.Tensor:
    x, mean, inverse = inputs.x, inputs.mean, inputs.inverse
    if form.kind == _GROUP:
        share = x.shape[1] // mean.shape[1]
        mean, inverse = (one.repeat_interleave(share, 1) for one in (mean, inverse))
    scale = inverse * inputs.weight
    if form.order == "shift":
        shift = torch.addcmul(inputs.bias, mean, -scale)
    else:
        shift = inputs.bias - mean * scale
    shape = (-1, x.shape[1], *[1] * (x.dim() - 2))
    return torch.addcmul(shift.view(shape), x, scale.view(shape))


# Which cheaper ways to repeat norms, and what follows them, are right to the last bit.
#
# Every order of multiplying and adding is tried on the recorded pass's own values and on random
# ones, and none is used that differs in one bit.

_REMEMBERED = 4  # norms before a sum or an activation
# Some orders differ in one number for each channel, which a third of the draws tell apart.
_MANY_CHANNELS, _MOST_DRAWS = 64, 4


@dataclass(frozen=True, slots=True)
class _Chain:
    """How the latest value was made from a norm's inputs."""

    value: int
    form: str
    inputs: NormInputs
    residual: torch.Tensor | None
    activation: str | None
    clock: OperatorClock


@dataclass(frozen=True, slots=True)
class AgainFound:
    """How an operator may be repeated: a form, or FUSED; `cost_ns` is known later."""

    how: str
    clocks: tuple[OperatorClock, ...]  # what all takes, and what it takes without this operator

    @property
    def cost_ns(self) -> int:
        took = [sum(clock.took_ns()) for clock in self.clocks]
        return max(0, took[0] - sum(took[1:]))


class AgainTrials:
    """Of one recorded pass, operator by operator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chains: deque[_Chain] = deque(maxlen=_REMEMBERED)

    def end(self) -> None:
        """No more operators: nothing of the pass is held."""
        self._chains.clear()

    def tried(
        self, func: Any, args: Any, values: Sequence[int], result: Any, made: int
    ) -> AgainFound | None:
        """`values` are those of the tensor arguments, `made` that of the result."""
        found = norm_inputs(func, args, result)
        if found is not None:
            form = _exact_form(func, args, *found, result[0])
            return None if form is None else self._norm(made, form, found[1])
        chain = self._longer(func, args, values)
        if chain is None:
            return None
        again = functools.partial(
            normalised,
            chain.form,
            chain.inputs,
            residual=chain.residual,
            activation=chain.activation,
        )
        if not _same(again(), result):
            return None
        before, clock = chain.clock, self._timed(again)
        self._chains.append(replace(chain, value=made, clock=clock))
        return AgainFound(FUSED, (clock, before))

    def _norm(self, made: int, form: str, inputs: NormInputs) -> AgainFound:
        clock = self._timed(functools.partial(normalised, form, inputs))
        self._chains.append(_Chain(made, form, inputs, None, None, clock))
        return AgainFound(form, (clock,))

    def _longer(self, func: Any, args: Any, values: Sequence[int]) -> _Chain | None:
        """The chain that this operator goes on with."""
        ends_in = {chain.value: chain for chain in self._chains if chain.activation is None}
        kind = plain_name(func).rstrip("_")
        if kind in ACTIVATIONS and values and values[0] in ends_in:
            return replace(ends_in[values[0]], activation=kind)
        if kind != "add" or len(args) != 2 or len(values) != 2 or values[0] == values[1]:
            return None
        for place, other in ((0, 1), (1, 0)):
            chain = ends_in.get(values[place])
            if chain is None or chain.residual is not None:
                continue
            # A view of a part is another tensor in the same storage.
            if all(lies_like(one, chain.inputs.x) for one in (args[place], args[other])):
                return replace(chain, residual=args[other])
        return None

    def _timed(self, again: Any) -> OperatorClock:
        clock = OperatorClock(self._device)
        clock.start()
        again()
        clock.stop()
        return clock


@functools.cache
def _exact_before() -> dict[tuple[Any, ...], str]:
    """The order that was exact for the latest norm of a kind: tried first."""
    return {}


def form_here(planned: str, func: Any, args: Any, result: Any) -> str | None:
    """The form of a plan, if it is right here, too; else another one that is. Libraries take other
    kernels for other batches, and a plan may come from another machine."""
    found = norm_inputs(func, args, result)
    if found is None:
        return None
    return _exact_form(func, args, *found, result[0], first=form_named(planned).order)


def _exact_form(
    func: Any,
    args: Any,
    kind: str,
    inputs: NormInputs,
    result: torch.Tensor,
    *,
    first: str | None = None,
) -> str | None:
    """Right for the values of this pass, and for others."""
    alike = (kind, inputs.x.device, inputs.x.dtype, inputs.x.is_contiguous())
    before = first or _exact_before().get(alike)
    draws = 1 if inputs.weight.numel() >= _MANY_CHANNELS else _MOST_DRAWS
    try:
        for order in sorted(orders_for(kind, inputs), key=lambda order: order != before):
            form = NormForm(kind, order).name
            if not _same(normalised(form, inputs), result):
                continue
            others = (_on_drawn_values(func, args, kind, inputs, seed) for seed in range(draws))
            if all(_same(normalised(form, other), right) for other, right in others):
                _exact_before()[alike] = order
                return form
    except torch.OutOfMemoryError:
        pass
    return None


def _on_drawn_values(
    func: Any, args: Any, kind: str, inputs: NormInputs, seed: int
) -> tuple[NormInputs, torch.Tensor]:
    """The same norm of random numbers. A weight that is still 1 and a bias that is still 0 make
    most orders give the same bits: which of them is right would show only later. The generator is
    one of its own: the training draws what it always does."""
    generator = torch.Generator(inputs.x.device).manual_seed(seed)
    given = inputs.x, inputs.weight, inputs.bias
    # With a mean of 0, how a product with it is rounded would hardly show.
    x, weight, bias = (torch.empty_like(one).normal_(mean=1, generator=generator) for one in given)
    changed = list(repeatable_arguments(func, args))
    for place, tensor in zip((0, *WEIGHT_PLACES[kind]), (x, weight, bias), strict=True):
        changed[place] = tensor
    result = func(*changed)
    return NormInputs(x, weight, bias, result[1], result[2]), result[0]


def _same(made: torch.Tensor, result: torch.Tensor) -> bool:
    return bool(made.stride() == result.stride() and torch.equal(made, result))
