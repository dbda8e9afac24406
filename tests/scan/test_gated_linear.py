"""Recurrences that are linear in their state, by linear_scan: exact against a loop in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from stepscope.fix.scan import linear_scan

if TYPE_CHECKING:
    from collections.abc import Callable

    Recur = Callable[[Any, Any], Any]

STEPS, BATCH, SIZE, STATES = 150, 2, 4, 3


def loop(decay: Any, inputs: Any) -> Any:
    """One step after the other."""
    state, states = torch.zeros_like(inputs[0]), []
    for a, b in zip(decay.expand_as(inputs), inputs, strict=True):
        state = a * state + b
        states.append(state)
    return torch.stack(states)


def min_gru(x: Any, weights: Any, recur: Recur) -> Any:
    """h = (1 - z) h + z c, with z and c of the input alone."""
    z = torch.sigmoid(x @ weights[0])
    return recur(1 - z, z * (x @ weights[1]))


def min_lstm(x: Any, weights: Any, recur: Recur) -> Any:
    """Forget and input gates that add up to one."""
    forget, take = torch.sigmoid(x @ weights[0]), torch.sigmoid(x @ weights[1])
    return recur(forget / (forget + take), take / (forget + take) * (x @ weights[2]))


def lru(x: Any, weights: Any, recur: Recur) -> Any:
    """A complex diagonal inside the unit circle, the same for all steps (LRU, S4D)."""
    size, angle = torch.exp(-torch.exp(weights[0][0])), weights[1][0]
    decay = torch.polar(size, angle)
    return recur(decay, (x @ weights[2]) * torch.sqrt(1 - size**2)).real


def selective(x: Any, weights: Any, recur: Recur) -> Any:
    """Each channel has several states; step size, input and output weights follow the input
    (Mamba)."""
    step = torch.nn.functional.softplus(x @ weights[0]).unsqueeze(-1)
    into, out = (x @ w[:, :STATES] for w in weights[1:])
    decay = torch.exp(-step * torch.arange(1, STATES + 1, dtype=x.dtype))
    states = recur(decay, step * into.unsqueeze(-2) * x.unsqueeze(-1))
    return (states * out.unsqueeze(-2)).sum(-1)


@pytest.mark.parametrize("model", [min_gru, min_lstm, lru, selective])
@pytest.mark.parametrize(("kind", "allowed"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_outputs_and_gradients_are_those_of_the_loop(
    model: Callable[..., Any], kind: torch.dtype, allowed: float
) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(STEPS, BATCH, SIZE, dtype=torch.float64)]
    exact += [torch.randn(SIZE, SIZE, dtype=torch.float64) for _ in range(3)]
    found = []
    for recur, precision in ((linear_scan, kind), (loop, torch.float64)):
        given = [one.to(precision).requires_grad_() for one in exact]
        output = model(given[0], given[1:], recur)
        gradients = torch.autograd.grad(output.square().sum(), given, allow_unused=True)
        found.append([output.detach(), *(one for one in gradients if one is not None)])
    for ours, right in zip(*found, strict=True):
        assert float((ours - right).norm() / right.norm()) < allowed
