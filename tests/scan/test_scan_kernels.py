"""The kernels compute what the batched products do. They need a GPU, or Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from stepscope.fix.scan import affine_maps
from stepscope.fix.scan.affine_maps import _by_chunks
from stepscope.fix.scan.gated_layer import StepJacobians, backward_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytest.importorskip("triton", reason="there is no Triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="no CUDA device, and TRITON_INTERPRET=1 is not set",
    ),
]


@pytest.mark.parametrize(
    ("steps", "batch", "size", "chunk", "tanh"),
    [(40, 3, 5, 4, True), (37, 2, 20, 8, False), (5, 1, 3, 8, True), (70, 17, 16, 2, True)],
)
def test_backward_through_time(steps: int, batch: int, size: int, chunk: int, tanh: bool) -> None:
    from stepscope.fix.scan.rnn_kernels import Launch, backward_states

    torch.manual_seed(0)
    gradient = torch.randn(steps, batch, size, device=DEVICE)
    state = torch.tanh(torch.randn_like(gradient))
    weight = torch.randn(size, size, device=DEVICE) / size**0.5
    slope = 1 - state * state if tanh else (state > 0).float()
    right = affine_maps.backward_states(gradient.double(), slope.double(), weight.double())
    ours = backward_states(gradient, state, weight, tanh=tanh, launch=Launch(chunk))
    for a, b in zip(ours, right, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-6


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies bfloat16 as whole numbers")
def test_products_of_16_bits_are_near() -> None:
    from stepscope.fix.scan.rnn_kernels import Launch, backward_states

    torch.manual_seed(0)
    gradient = torch.randn(30, 2, 5, device=DEVICE)
    state, weight = torch.tanh(torch.randn_like(gradient)), torch.eye(5, device=DEVICE) * 0.9
    right = affine_maps.backward_states(gradient, 1 - state * state, weight)
    ours = backward_states(gradient, state, weight, tanh=True, launch=Launch(8), precision="bf16")
    for a, b in zip(ours, right, strict=True):
        assert 1e-5 < float((a - b).norm() / b.norm()) < 2e-2


@pytest.mark.parametrize(
    ("steps", "batch", "size", "features"),
    [(40, 3, 5, 4), (200, 2, 20, 70), (1, 1, 3, 1), (33, 17, 16, 130)],
)
def test_weight_gradients(steps: int, batch: int, size: int, features: int) -> None:
    from stepscope.fix.scan.rnn_gradient_kernels import weight_gradients

    torch.manual_seed(0)
    reached, state = (torch.randn(steps, batch, size, device=DEVICE) for _ in range(2))
    initial = torch.randn(batch, size, device=DEVICE)
    inputs = torch.randn(steps, batch, features, device=DEVICE)
    before = torch.cat([initial.unsqueeze(0), state[:-1]])
    found = weight_gradients(reached, state, initial, inputs)
    rows = reached.double().flatten(0, 1)
    torch.testing.assert_close(
        found.input.double(), rows.t() @ inputs.double().flatten(0, 1), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        found.recurrent.double(), rows.t() @ before.double().flatten(0, 1), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(found.bias.double(), rows.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("steps", "width"), [(130, 130), (5, 3), (64, 1)])
@pytest.mark.parametrize("kind", [torch.float32, torch.complex64])
def test_linear_recurrences(steps: int, width: int, kind: torch.dtype) -> None:
    """Decays that are conjugate views too, as backward has them."""
    from stepscope.fix.scan.recurrence_kernels import scan_pairs

    torch.manual_seed(0)
    decay = (0.7 * torch.randn(steps, width, device=DEVICE, dtype=kind)).conj()
    inputs = torch.randn(steps, width, device=DEVICE, dtype=kind)
    exact = torch.complex128 if kind.is_complex else torch.float64
    right = _by_chunks(decay.to(exact), inputs.to(exact))
    ours = scan_pairs(decay, inputs).to(exact)
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("radius", "lasts"), [(1.0, 1), (0.5, 0)])
def test_a_chain_that_remembers_is_noted(radius: float, lasts: int) -> None:
    from stepscope.fix.scan.rnn_kernels import Launch, _Scan

    torch.manual_seed(0)
    gradient = torch.randn(48, 2, 5, device=DEVICE)
    state, weight = torch.zeros_like(gradient), radius * torch.eye(5, device=DEVICE)
    scan = _Scan.first(2, 5, True, "tf32x3", Launch(16), gradient.device)
    maps, left = scan.empty_maps(3), torch.empty_like(gradient[0])
    scan.backward(gradient, state, weight, maps, torch.empty_like(gradient), left)
    assert scan.lasting.item() == lasts


def test_where_nothing_lasts_the_second_launches_do_nothing() -> None:
    from stepscope.fix.scan.rnn_kernels import Launch, _Scan

    gradient = torch.ones(20, 2, 5, device=DEVICE)
    scan = _Scan.first(2, 5, True, "tf32x3", Launch(8), gradient.device).again()
    maps, given = scan.empty_maps(3), (gradient, torch.zeros_like(gradient))
    weight = torch.eye(5, device=DEVICE)
    reached, left = torch.full_like(gradient, 7), torch.full_like(gradient[0], 7)
    scan.backward(*given, weight, maps, reached, left)
    assert (reached == 7).all()
    assert (left == 7).all()
    scan.lasting.fill_(1)
    scan.backward(*given, weight, maps, reached, left)
    assert reached[0].eq(20).all()
    assert left.eq(20).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("radius", [0.9, 1.0, 1.1])
def test_errors_do_not_add_up_over_steps(radius: float, fused: bool) -> None:
    """At radius 1.1 the gradient grows to 10^29: tensor cores alone were 7 in 10^5 off."""
    from stepscope.fix.scan.rnn_gradient_kernels import layer_gradients
    from stepscope.fix.scan.rnn_kernels import Launch, backward_states

    torch.manual_seed(0)
    steps, size = (60, 5) if INTERPRETED else (700, 20)
    gradient = torch.randn(steps, 3, size, device=DEVICE)
    state = torch.tanh(0.1 * torch.randn_like(gradient))
    weight = torch.randn(size, size, device=DEVICE)
    weight *= radius / torch.linalg.eigvals(weight).abs().max()
    slope = (1 - state * state).double()
    right = affine_maps.backward_states(gradient.double(), slope, weight.double())[1]
    if fused:
        inputs, feed = torch.zeros(steps, 3, 1, device=DEVICE), torch.zeros(size, 1, device=DEVICE)
        left = layer_gradients(
            gradient, state, inputs, torch.zeros_like(right, dtype=torch.float32), feed, weight,
            tanh=True, chunk=16, precision="fp16x3", wants_inputs=False,
        )[1]  # fmt: skip
    else:
        left = backward_states(
            gradient, state, weight, tanh=True, launch=Launch(16), precision="tf32x3"
        )[1]
    assert float((left - right).norm() / right.norm()) < 1e-5


@pytest.mark.parametrize(
    ("steps", "batch", "size", "features", "wants_inputs", "tanh"),
    [
        (37, 3, 5, 4, True, True),  # the offset has a row of the matrix
        (33, 2, 16, 32, True, False),  # it has none
        (21, 17, 20, 8, False, True),  # two blocks of sequences
        (1, 1, 3, 1, True, True),
    ],
)
def test_the_fused_layer_is_the_chain_rule(
    steps: int, batch: int, size: int, features: int, wants_inputs: bool, tanh: bool
) -> None:
    from stepscope.fix.scan.rnn_gradient_kernels import layer_gradients

    torch.manual_seed(0)
    gradient = torch.randn(steps, batch, size, device=DEVICE)
    state = torch.tanh(torch.randn_like(gradient))
    initial, weight = torch.randn_like(state[0]), torch.randn(size, size, device=DEVICE) / size**0.5
    inputs = torch.randn(steps, batch, features, device=DEVICE)
    weight_input = torch.randn(size, features, device=DEVICE)
    slope = (1 - state * state if tanh else (state > 0).float()).double()
    reached, left = affine_maps.backward_states(gradient.double(), slope, weight.double(), 8)
    rows = reached.flatten(0, 1).t()
    before = torch.cat([initial.unsqueeze(0), state[:-1]]).double().flatten(0, 1)
    right = [
        reached @ weight_input.double() if wants_inputs else torch.empty(0, device=DEVICE),
        left, rows @ inputs.double().flatten(0, 1), rows @ before, rows.sum(1),
    ]  # fmt: skip
    for precision in ("tf32x3", "fp16x3"):
        found = layer_gradients(
            gradient, state, inputs, initial, weight_input, weight,
            tanh=tanh, chunk=8, precision=precision, wants_inputs=wants_inputs,
        )  # fmt: skip
        for a, b in zip(found, right, strict=True):
            assert a.shape == b.shape
            assert float((a - b).norm()) <= 1e-6 * float(b.norm()), precision


@pytest.mark.parametrize(
    ("steps", "batch", "size", "mixed", "kept", "chunk"),
    [(40, 3, 5, 4, 0, 4), (37, 2, 20, 4, 0, 8), (70, 1, 6, 5, 3, 2), (21, 2, 40, 5, 20, 10)],
)
def test_backward_through_gated_steps(
    steps: int, batch: int, size: int, mixed: int, kept: int, chunk: int
) -> None:
    from stepscope.fix.scan.recurrence_kernels import backward_rows as by_kernels

    torch.manual_seed(0)
    gradient = torch.randn(steps, batch, size, device=DEVICE)
    coefficient = torch.rand(steps, batch, size, mixed, device=DEVICE) - 0.5
    basis = torch.randn(size, mixed, size, device=DEVICE) / size**0.5
    exact = StepJacobians(coefficient.double(), basis.double(), kept)
    right = backward_rows(gradient.double(), exact)
    ours = by_kernels(gradient, coefficient, basis, kept, chunk)
    for a, b in zip(ours, right, strict=True):
        assert float((a - b).norm() / b.norm()) < 5e-6
