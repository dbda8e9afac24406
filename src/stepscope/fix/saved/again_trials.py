"""Which cheaper ways to repeat norms, and what follows them, are right to the last bit.

Every order of multiplying and adding is tried on the recorded pass's own values, and none is used
that differs in one bit.
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
    NormForm,
    NormInputs,
    lies_like,
    norm_inputs,
    normalised,
    orders_for,
)
from stepscope.fix.saved.operator_clock import OperatorClock
from stepscope.fix.saved.operators import plain_name

if TYPE_CHECKING:
    from collections.abc import Sequence

_REMEMBERED = 4  # norms before a sum or an activation


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
            form = _exact_form(*found, result[0])
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


def _exact_form(kind: str, inputs: NormInputs, result: torch.Tensor) -> str | None:
    alike = (kind, inputs.x.device, inputs.x.dtype, inputs.x.is_contiguous())
    before = _exact_before().get(alike)
    for order in sorted(orders_for(kind, inputs), key=lambda order: order != before):
        form = NormForm(kind, order).name
        if _same(normalised(form, inputs), result):
            _exact_before()[alike] = order
            return form
    return None


def _same(made: torch.Tensor, result: torch.Tensor) -> bool:
    return bool(made.stride() == result.stride() and torch.equal(made, result))
