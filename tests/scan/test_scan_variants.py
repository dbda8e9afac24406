"""The ways that scan_variants.py times all compute the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from stepscope.fix.scan import affine_maps

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

pytest.importorskip("triton", reason="there is no Triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="no CUDA device, and TRITON_INTERPRET=1 is not set",
    ),
]


@pytest.mark.parametrize(("steps", "batch", "size", "tanh"), [(37, 3, 5, True), (30, 5, 18, False)])
def test_every_way_is_the_chain_rule(steps: int, batch: int, size: int, tanh: bool) -> None:
    from scan_variants import ways

    torch.manual_seed(0)
    gradient = torch.randn(steps, batch, size, device=DEVICE)
    state = torch.tanh(torch.randn_like(gradient))
    weight = torch.randn(size, size, device=DEVICE) / size**0.5
    slope = 1 - state * state if tanh else (state > 0).float()
    right = affine_maps.backward_states(gradient.double(), slope.double(), weight.double(), 8)
    for name, way in ways(gradient.shape, DEVICE, 4).items():
        allowed = 1e-2 if name == "one tf32 product" else 3e-6
        for a, b in zip(way(gradient, state, weight, tanh=tanh), right, strict=True):
            assert float((a - b).norm() / b.norm()) < allowed, name
