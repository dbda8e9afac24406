"""Backward through time as a scan: exact, of logarithmic depth, and never out of range early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepscope.fix.scan import affine_maps
from stepscope.fix.scan.affine_maps import backward_states


def one_after_the_other(gradient: Any, slope: Any, weight: Any) -> tuple[Any, Any]:
    row, reached = torch.zeros_like(gradient[0]), torch.empty_like(gradient)
    for step in reversed(range(len(gradient))):
        reached[step] = (row + gradient[step]) * slope[step]
        row = reached[step] @ weight
    return reached, row


def made_up(
    steps: int, radius: float, batch: int = 2, size: int = 12, kind: Any = torch.float64
) -> Any:
    draw = torch.Generator().manual_seed(steps)
    weight = torch.randn(size, size, generator=draw, dtype=torch.float64)
    weight *= radius / torch.linalg.eigvals(weight).abs().max()
    gradient, state = (
        torch.randn(steps, batch, size, generator=draw, dtype=torch.float64) for _ in range(2)
    )
    return gradient.to(kind), (1 - torch.tanh(0.1 * state) ** 2).to(kind), weight.to(kind)


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, None])
@pytest.mark.parametrize("steps", [1, 2, 15, 16, 17, 300])
def test_it_is_the_chain_rule(steps: int, chunk: int | None) -> None:
    given = made_up(steps, 1.0)
    for ours, right in zip(
        backward_states(*given, chunk), one_after_the_other(*given), strict=True
    ):
        torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("steps", [1024, pytest.param(32768, marks=pytest.mark.slow)])
@pytest.mark.parametrize("radius", [0.9, 1.0, 1.1])
def test_single_precision_is_exact_to_ten_to_the_minus_five(radius: float, steps: int) -> None:
    """The slopes hold the gradient of radius 1.1 in range."""
    gradient, slope, weight = made_up(steps, radius)
    slope = slope * min(1.0, 0.98 / radius)
    right, left = one_after_the_other(gradient, slope, weight)
    ours, ours_left = backward_states(gradient.float(), slope.float(), weight.float(), 32)
    assert float((ours - right).norm() / right.norm()) < 1e-5
    assert float((ours_left - left).norm() / left.norm()) < 1e-5


def test_products_out_of_range_do_no_harm_where_the_gradient_is_in_range() -> None:
    """1.5^5000 is far beyond a float, but only the first 50 steps have a gradient of their own."""
    gradient, slope, weight = made_up(5000, 1.5, kind=torch.float32)
    gradient[50:] = 0
    right, _ = one_after_the_other(gradient.double(), slope.double(), weight.double())
    ours, left = backward_states(gradient, slope, weight, 32)
    assert torch.isfinite(ours).all()
    assert torch.isfinite(left).all()
    assert float((ours - right).norm() / right.norm()) < 1e-4


def test_a_gradient_that_vanishes_is_zero_not_nan() -> None:
    gradient, slope, weight = made_up(3000, 0.3, kind=torch.float32)
    gradient[:-1] = 0
    ours, left = backward_states(gradient, slope, weight, 32)
    assert torch.isfinite(ours).all()
    assert float(left.abs().max()) == 0


def test_the_critical_path_grows_with_the_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that wait for each other, counted in levels of groups of at most sixteen."""
    levels: list[int] = []
    fold = affine_maps._fold_maps

    def counted(members: Any) -> Any:
        levels.append(members.offset.shape[1])
        return fold(members)

    monkeypatch.setattr(affine_maps, "_fold_maps", counted)
    depths = []
    for steps in (16**2, 16**3, 16**4):
        levels.clear()
        backward_states(*made_up(steps, 0.9, batch=1, size=2), 16)
        depths.append(2 * 16 + 2 * sum(levels) + 16)
    assert [depth - depths[0] for depth in depths] == [0, 32, 64]


def test_a_plain_loop_where_chunks_cannot_run_at_the_same_time() -> None:
    """Folding a step costs a matrix instead of a row: on a CPU only tiny states are worth it."""
    assert affine_maps.usual_chunk(torch.empty(4096, 16, 20)) == 4096
    assert affine_maps.usual_chunk(torch.empty(16384, 1, 4)) < 1024
