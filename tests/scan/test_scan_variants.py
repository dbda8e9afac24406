"""The ways that scan_variants.py times all compute the same."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.fix.scan import affine_maps
from stepscope.records import scan_costs

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None
    or (not INTERPRETED and not torch.cuda.is_available()),
    reason="no Triton, or neither a CUDA device nor TRITON_INTERPRET=1",
)


@pytest.mark.gpu
@needs_kernels
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
def test_two_launches_are_the_chain_rule(
    steps: int, batch: int, size: int, features: int, wants_inputs: bool, tanh: bool
) -> None:
    from stepscope.fix.scan.fused_kernels import layer_gradients

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


def measured(steps: int, separate: float, fused: float, error: float = 1e-7) -> dict[str, Any]:
    names = ("layer, by parts", "layer, two launches")
    return {
        "part": "layer",
        "steps": steps,
        "ms": dict(zip(names, (separate, fused), strict=True)),
        "error": dict.fromkeys(names, error),
    }


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([measured(1024, 0.5, 0.3), measured(4096, 0.6, 0.4)], "(1024, 4096)"),
        ([measured(1024, 0.5, 0.3), measured(32768, 1.0, 1.2)], "(1024, 1024)"),
        ([measured(1024, 0.5, 0.49)], "None"),  # less than 5%
        ([measured(1024, 0.5, 0.3, error=1e-3)], "(7, 9)"),  # too far off: nothing is changed
        ([measured(1, 2, 1), measured(2, 1, 2), measured(3, 2, 1)], "(7, 9)"),  # by hand
        ([], "(7, 9)"),
    ],
)
def test_the_faster_way_is_promoted(tmp_path: Path, rows: list[Any], line: str) -> None:
    from scan_variants import promote

    costs = tmp_path / "scan_costs.py"
    costs.write_text("A = 1\nFUSED_STEPS: tuple[int, int] | None = (7, 9)\nB = 2\n")
    promote(rows, costs)
    assert costs.read_text() == f"A = 1\nFUSED_STEPS: tuple[int, int] | None = {line}\nB = 2\n"


def test_the_line_to_promote_is_there(tmp_path: Path) -> None:
    import scan_variants

    costs = tmp_path / "scan_costs.py"
    costs.write_text(scan_variants._COSTS.read_text())
    told = scan_variants.promote([measured(1024, 0.5, 0.3)], costs)
    assert told == "FUSED_STEPS = (1024, 1024) (1024: 1.67x)"


def test_two_launches_only_where_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_costs, "FUSED_STEPS", (1024, 4096))
    fits = scan_costs.takes_two_launches
    assert fits(1024, 20, 8)
    assert fits(4096, 32, 32)
    assert not fits(1023, 20, 8)
    assert not fits(32768, 20, 8)
    assert not fits(2048, 33, 8)
    assert not fits(2048, 20, 33)
    monkeypatch.setattr(scan_costs, "FUSED_STEPS", None)
    assert not fits(1024, 20, 8)
