"""h = a * h + b by a scan: states and gradients of the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepscope.fix.scan import linear_scan
from stepscope.fix.scan.affine_maps import SecondDerivativeError


def loop(decay: Any, inputs: Any, initial: Any) -> Any:
    state, states = initial, []
    for a, b in zip(decay.expand_as(inputs), inputs, strict=True):
        state = a * state + b
        states.append(state)
    return torch.stack(states)


@pytest.mark.parametrize("steps", [1, 2, 63, 64, 65, 500])
@pytest.mark.parametrize("kind", [torch.float64, torch.complex128])
def test_states_and_gradients_are_those_of_the_loop(steps: int, kind: Any) -> None:
    torch.manual_seed(steps)
    decay, inputs = (torch.randn(steps, 2, 3, dtype=kind) * scale for scale in (0.6, 1.0))
    given = [values.requires_grad_() for values in (decay, inputs, torch.randn(2, 3, dtype=kind))]
    gradient = torch.randn(steps, 2, 3, dtype=kind)
    right, ours = loop(*given), linear_scan(*given)
    torch.testing.assert_close(ours, right)
    for a, b in zip(
        torch.autograd.grad(ours, given, gradient),
        torch.autograd.grad(right, given, gradient),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_decay_that_all_steps_share_is_spread_and_its_gradient_summed() -> None:
    decay = torch.rand(3, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(100, 2, 3, dtype=torch.float64)
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    ours = torch.autograd.grad(linear_scan(decay, inputs).sum(), decay)
    right = torch.autograd.grad(loop(decay, inputs, zeros).sum(), decay)
    torch.testing.assert_close(ours, right)


def test_decays_of_zero_cut_the_sequence() -> None:
    decay = torch.ones(200, 1)
    decay[100] = 0
    assert linear_scan(decay, torch.ones(200, 1))[[99, 100, 199], 0].tolist() == [100, 1, 100]


def test_bad_shapes_and_second_derivatives_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        linear_scan(torch.ones(0, 2), torch.ones(0, 2))
    decay = torch.rand(5, 2, requires_grad=True)
    (first,) = torch.autograd.grad(
        linear_scan(decay, torch.ones(5, 2)).sum(), decay, create_graph=True
    )
    with pytest.raises(SecondDerivativeError):
        first.sum().backward()


@pytest.mark.parametrize("quiet", [0, 200])
def test_products_overflow_where_no_state_does(quiet: int) -> None:
    """Decays of 3 over 400 steps pass a float's range; the states are zero there, or were reset."""
    decay = torch.full((600, 2), 3.0)
    decay[400:] = 0.5
    decay[410] = 0.0
    inputs = torch.zeros(600, 2)
    inputs[quiet] = 1e-30 if quiet else 0.0
    inputs[350 + quiet // 4 :] = 1.0
    decay[quiet + 20] = 0.0
    expected, state = [], torch.zeros(2)
    for a, b in zip(decay, inputs, strict=True):
        state = a * state + b
        expected.append(state)
    right = torch.stack(expected)
    assert right.isfinite().all()
    torch.testing.assert_close(linear_scan(decay, inputs), right)
