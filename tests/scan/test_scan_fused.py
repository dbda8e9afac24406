"""A fused layer computes what its parts do."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from stepscope.fix.scan import affine_maps
from stepscope.records import scan_costs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None
    or (not INTERPRETED and not torch.cuda.is_available()),
    reason="no Triton, or neither a CUDA device nor TRITON_INTERPRET=1",
)


@pytest.mark.gpu
@needs_kernels
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


def test_a_layer_is_fused_where_registers_hold_it() -> None:
    assert scan_costs.is_fused(20, 8)
    assert scan_costs.is_fused(32, 32)
    assert not scan_costs.is_fused(33, 8)
    assert not scan_costs.is_fused(20, 33)
