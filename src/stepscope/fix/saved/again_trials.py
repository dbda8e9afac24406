"""Which cheaper ways to repeat norms, and what follows them, are right to the last bit.

Every order of multiplying and adding is tried on the recorded pass's own values and on random ones,
and none is used that differs in one bit.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.saved.normalised_again import (
    ACTIVATIONS,
    FUSED,
    WEIGHT_PLACES,
    NormForm,
    NormInputs,
    form_named,
    lies_like,
    norm_inputs,
    normalised,
    orders_for,
)
from stepscope.fix.saved.operator_clock import OperatorClock
from stepscope.fix.saved.operators import plain_name, repeatable_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

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
