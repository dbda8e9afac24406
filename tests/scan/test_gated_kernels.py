"""The kernels of gated cells compute what the batched products do."""

from __future__ import annotations

import os

import pytest
import torch

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
