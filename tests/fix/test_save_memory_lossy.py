"""save_memory(lossy=...): off by default, marked, near the exact gradients; and sparse values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.fix import save_memory
from stepscope.fix.saved import MemorySaver, SavePlan
from stepscope.fix.saved.encodings.registry import precise_values
from stepscope.fix.saved.step_record import LOSSY, RecordedCall, SavedUse


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
    """Products are not repeated, and most of these are zero. One alone would not be packed: when
    it is read, it is there packed and unpacked."""
    torch.manual_seed(0)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
            self.gate = nn.Buffer(torch.eye(256)[:, torch.arange(256) % 4 * 3])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu() @ self.gate
            return x

    model, x = Gated(), torch.randn(128, 256)
    saver = save_memory(model)
    for _ in range(3):
        model(x).sum().backward()
    saver.remove()
    assert saver.plan is not None
    assert any(row.action == "encode: sparse" for row in saver.plan.rows), str(saver.plan)


class LargestOfEach(nn.Module):
    """Torch's backward of amax asks which elements equal the largest, and divides by how many."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.norm = nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16)
        self.scores = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(torch.relu(self.norm(self.points(x))).amax(-1))


@pytest.mark.parametrize("lossy", ["bf16", "4-bit"])
def test_what_an_exact_comparison_depends_on_is_not_rounded(lossy: str) -> None:
    torch.manual_seed(0)
    model, x = LargestOfEach(), torch.randn(8, 3, 64)
    save_memory(model, warmup=0, lossy=lossy)
    for _ in range(4):
        model.zero_grad()
        model(x).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def use(value: int, consumer: str, order: int, *shape: int) -> SavedUse:
    return SavedUse(
        value=value, after=0, shape=shape, dtype="float32", consumer=consumer, order=order
    )


def call(inputs: int, outputs: int, refusal: str | None = None) -> RecordedCall:
    return RecordedCall(name="", inputs=(inputs,), outputs=(outputs,), took_ns=1, refusal=refusal)


def test_values_are_precise_as_far_as_operators_can_be_repeated() -> None:
    """0 -conv-> 1 -relu-> 2 -amax-> 3 -div-> 4: amax compares 2, which relu makes from 1."""
    calls = [call(0, 1, "heavy"), call(1, 2), call(2, 3), call(3, 4)]
    uses = [use(0, "ConvolutionBackward0", 0, 9), use(2, "AmaxBackward0", 2, 9)]
    assert precise_values(uses, calls) == {1, 2}
    assert precise_values([use(3, "DivBackward0", 3, 9)], calls) == {1, 2, 3}
    assert precise_values([use(2, "MulBackward0", 3, 9)], calls) == set()


def test_a_norms_statistics_are_precise_and_its_input_is_not() -> None:
    node = "NativeBatchNormBackward0"
    uses = [use(0, node, 1, 8, 4, 9), use(1, node, 1, 4), use(2, node, 1, 4)]
    assert precise_values(uses, []) == {1, 2}
