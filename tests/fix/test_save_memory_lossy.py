"""save_memory(lossy=...): off by default, marked, near the exact gradients; and sparse values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.fix import save_memory
from stepscope.fix.saved import MemorySaver, SavePlan
from stepscope.fix.saved.encoding_names import LOSSY


def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.SiLU())]
    return nn.Sequential(*layers, nn.Linear(64, 8)), torch.randn(96, 64)


def gradients(lossy: str | None) -> tuple[torch.Tensor, torch.Tensor, MemorySaver]:
    """The last of three steps: loss, all gradients in a row."""
    model, x = net()
    saver = save_memory(model, lossy=lossy)
    for _ in range(3):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
    saver.remove()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    return loss.detach(), found, saver


@pytest.mark.parametrize("lossy", LOSSY)
def test_lossy_training_is_near_and_says_so(lossy: str) -> None:
    exact_loss, exact, _ = gradients(None)
    loss, found, saver = gradients(lossy)
    assert saver.plan is not None
    assert torch.equal(loss, exact_loss)  # forward is not touched
    assert any(row.action == f"encode: {lossy} (lossy)" for row in saver.plan.rows)
    assert any("lossy" in note for note in saver.plan.notes)
    assert not torch.equal(found, exact)
    assert float((found - exact).norm() / exact.norm()) < 0.2
    assert SavePlan.from_json(saver.plan.to_json()) == saver.plan


def test_without_asking_nothing_is_lossy() -> None:
    _, _, saver = gradients(None)
    assert saver.plan is not None
    assert not any("lossy" in row.action for row in saver.plan.rows)


def test_an_unknown_lossy_encoding_is_refused() -> None:
    with pytest.raises(UsageError, match="lossy='fp4': pass one of bf16"):
        save_memory(nn.Linear(2, 2), lossy="fp4")


def test_values_with_zeros_are_packed() -> None:
    """A product is not repeated, and most of this one is zero."""
    torch.manual_seed(0)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 8)
            self.gate = nn.Buffer(torch.eye(256)[:, torch.arange(256) % 4 * 3])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sparse: torch.Tensor = self.first(x).relu() @ self.gate
            return self.second(sparse)

    model, x = Gated(), torch.randn(128, 64)
    saver = save_memory(model)
    for _ in range(3):
        model(x).sum().backward()
    saver.remove()
    assert saver.plan is not None
    assert any(row.action == "encode: sparse" for row in saver.plan.rows), str(saver.plan)
