"""h = a * h + b by a scan: states and gradients of the plain loop."""

from __future__ import annotations

from collections.abc import Callable
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


def loop_from_zero(decay: Any, inputs: Any) -> Any:
    return loop(decay, inputs, torch.zeros_like(inputs[0]))


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
    ours = torch.autograd.grad(linear_scan(decay, inputs).sum(), decay)
    right = torch.autograd.grad(loop_from_zero(decay, inputs).sum(), decay)
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
    right = loop_from_zero(decay, inputs)
    assert right.isfinite().all()
    torch.testing.assert_close(linear_scan(decay, inputs), right)


def test_decays_and_states_of_another_shape() -> None:
    inputs = torch.randn(5, 2, 3)
    with pytest.raises(ValueError, match=r"decay is \[4\]"):
        linear_scan(torch.rand(4), inputs)
    with pytest.raises(ValueError, match=r"initial is \[7\]"):
        linear_scan(torch.rand(3), inputs, torch.zeros(7))


# Models that are linear in their state.

Recur = Callable[[Any, Any], Any]
STEPS, BATCH, SIZE, STATES = 150, 2, 4, 3


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
def test_models_with_a_linear_recurrence_train_as_with_the_loop(
    model: Callable[..., Any], kind: torch.dtype, allowed: float
) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(STEPS, BATCH, SIZE, dtype=torch.float64)]
    exact += [torch.randn(SIZE, SIZE, dtype=torch.float64) for _ in range(3)]
    found = []
    for recur, precision in ((linear_scan, kind), (loop_from_zero, torch.float64)):
        given = [one.to(precision).requires_grad_() for one in exact]
        output = model(given[0], given[1:], recur)
        gradients = torch.autograd.grad(output.square().sum(), given, allow_unused=True)
        found.append([output.detach(), *(one for one in gradients if one is not None)])
    for ours, right in zip(*found, strict=True):
        assert float((ours - right).norm() / right.norm()) < allowed
