"""A batch norm's result once more, from its input and the statistics that backward keeps anyway.

One pass over the input, where the norm itself takes two or three; a sum and a ReLU that follow are
done in the same pass. In which order a library multiplies and adds differs from kernel to kernel:
every order is tried on the recorded pass's own values, and none is used that differs in one bit.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.saved.encodings.device_kernels import kernels_for
from stepscope.fix.saved.operator_clock import OperatorClock
from stepscope.fix.saved.operators import BATCH_NORMS, TRAINING_PLACE, plain_name

if TYPE_CHECKING:
    from collections.abc import Sequence

FUSED = "fused"  # with the norm before it
_IN_TORCH = ("shift",)
_IN_KERNELS = ("weighted", "scaled", "centred", "shift")
_REMEMBERED = 4  # norms before a sum or a ReLU


@dataclass(frozen=True, slots=True)
class NormInputs:
    """What the result is had from: the norm's input, its weight and bias, the batch's mean and the
    inverse of its deviation."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    mean: torch.Tensor
    inverse: torch.Tensor


def normalised(
    form: str,
    inputs: NormInputs,
    *,
    residual: torch.Tensor | None = None,
    relu: bool = False,
) -> torch.Tensor:
    """The norm's result, plus `residual`, through a ReLU."""
    if kernels_for(inputs.x, "norm_kernels") is None:
        made = _shifted(inputs)
    elif residual is None or _lies_like(residual, inputs.x):
        return _in_one_kernel(form, inputs, residual, relu=relu)
    else:
        made = _in_one_kernel(form, inputs, None, relu=False)
    if residual is not None:
        made = made + residual
    return made.relu_() if relu else made


def _in_one_kernel(
    form: str, inputs: NormInputs, residual: torch.Tensor | None, *, relu: bool
) -> torch.Tensor:
    kernels = kernels_for(inputs.x, "norm_kernels")
    made: torch.Tensor = kernels.normalise(
        form,
        inputs.x,
        inputs.weight,
        inputs.bias,
        inputs.mean,
        inputs.inverse,
        inner=inner_size(inputs.x),
        residual=residual,
        relu=relu,
    )
    return made


def norm_inputs(func: Any, args: Any, result: Any) -> NormInputs | None:
    """Of a batch norm in training with weight and bias; None of anything else."""
    if plain_name(func) not in BATCH_NORMS or len(args) <= TRAINING_PLACE:
        return None
    if not args[TRAINING_PLACE] or args[1] is None or args[2] is None:
        return None
    inputs = NormInputs(args[0], args[1], args[2], result[1], result[2])
    known = inputs.mean.numel() == inputs.inverse.numel() == inputs.weight.numel()
    return inputs if known and inner_size(inputs.x) is not None else None


def needed_again(func: Any, args: Any, result: Any) -> tuple[torch.Tensor, ...]:
    """What repeating the operator needs beside its inputs."""
    inputs = norm_inputs(func, args, result)
    return () if inputs is None else (inputs.mean, inputs.inverse)


def inner_size(x: torch.Tensor) -> int | None:
    """Neighbours in memory that share a channel; None where memory has gaps or another order."""
    if x.dim() < 2 or not x.numel():
        return None
    if x.is_contiguous():
        return int(x.numel() // (x.shape[0] * x.shape[1]))
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    fitting = formats.get(x.dim())
    return 1 if fitting is not None and x.is_contiguous(memory_format=fitting) else None


def _lies_like(other: torch.Tensor, x: torch.Tensor) -> bool:
    layouts = [(one.shape, one.stride(), one.dtype) for one in (other, x)]
    return bool(layouts[0] == layouts[1])


def _shifted(inputs: NormInputs) -> torch.Tensor:
    shape = (1, -1, *[1] * (inputs.x.dim() - 2))
    scale = inputs.inverse * inputs.weight
    shift = torch.addcmul(inputs.bias, inputs.mean, -scale)
    return torch.addcmul(shift.view(shape), inputs.x, scale.view(shape))


@functools.cache
def _exact_before() -> dict[tuple[Any, ...], str]:
    """The form that was exact for the latest norm of a kind: tried first."""
    return {}


def _exact_form(inputs: NormInputs, result: torch.Tensor) -> str | None:
    kernels = kernels_for(inputs.x, "norm_kernels")
    if kernels is None and inputs.x.device.type != "cpu":
        return None
    forms = _IN_TORCH if kernels is None else _IN_KERNELS
    kind = (inputs.x.device, inputs.x.dtype, inputs.x.is_contiguous())
    before = _exact_before().get(kind)
    for form in sorted(forms, key=lambda form: form != before):
        if _same(normalised(form, inputs), result):
            _exact_before()[kind] = form
            return form
    return None


def _same(made: torch.Tensor, result: torch.Tensor) -> bool:
    return bool(made.stride() == result.stride() and torch.equal(made, result))


@dataclass(frozen=True, slots=True)
class _Chain:
    """How the latest value was made from a norm's inputs."""

    value: int
    form: str
    inputs: NormInputs
    residual: torch.Tensor | None
    relu: bool
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
        inputs = norm_inputs(func, args, result)
        if inputs is not None:
            form = _exact_form(inputs, result[0])
            return None if form is None else self._norm(made, form, inputs)
        chain = self._longer(func, args, values)
        if chain is None:
            return None
        again = functools.partial(
            normalised, chain.form, chain.inputs, residual=chain.residual, relu=chain.relu
        )
        if not _same(again(), result):
            return None
        before, clock = chain.clock, self._timed(again)
        self._chains.append(replace(chain, value=made, clock=clock))
        return AgainFound(FUSED, (clock, before))

    def _norm(self, made: int, form: str, inputs: NormInputs) -> AgainFound:
        clock = self._timed(functools.partial(normalised, form, inputs))
        self._chains.append(_Chain(made, form, inputs, None, relu=False, clock=clock))
        return AgainFound(form, (clock,))

    def _longer(self, func: Any, args: Any, values: Sequence[int]) -> _Chain | None:
        """The chain that this operator goes on with."""
        ends_in = {chain.value: chain for chain in self._chains if not chain.relu}
        kind = plain_name(func).rstrip("_")
        if kind == "relu" and values and values[0] in ends_in:
            return replace(ends_in[values[0]], relu=True)
        if kind != "add" or len(args) != 2 or len(values) != 2 or values[0] == values[1]:
            return None
        for place, other in ((0, 1), (1, 0)):
            chain = ends_in.get(values[place])
            if chain is None or chain.residual is not None:
                continue
            # A view of a part is another tensor in the same storage.
            if all(_lies_like(one, chain.inputs.x) for one in (args[place], args[other])):
                return replace(chain, residual=args[other])
        return None

    def _timed(self, again: Any) -> OperatorClock:
        clock = OperatorClock(self._device)
        clock.start()
        again()
        clock.stop()
        return clock
