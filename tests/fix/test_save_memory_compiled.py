"""save_memory on compiled models sets the compiler's budget for that model alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config

from stepscope.errors import UsageError
from stepscope.fix import save_memory

# Torch warns about itself while it compiles.
pytestmark = pytest.mark.filterwarnings("ignore")
BACKEND = "aot_eager_decomp_partition"  # the partitioner without a code generator


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [
            layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))
        ]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def saved_bytes(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """What backward keeps, without parameters."""
    owned = {p.untyped_storage()._cdata for p in model.parameters()}
    storages: dict[int, Any] = {}

    @torch.compiler.disable  # type: ignore[misc]
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(torch.ones(16, 32))
    return sum(s.nbytes() for address, s in storages.items() if address not in owned)


def gradients(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    run(torch.ones(16, 32)).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def compiled(model: nn.Module, backend: Any, *, in_place: bool) -> Any:
    if in_place:
        model.compile(backend=backend)
        return model
    return torch.compile(model, backend=backend)


@pytest.mark.slow
def test_the_compiler_keeps_less_for_this_model() -> None:
    first, second = make(), make()
    plain = compiled(first, BACKEND, in_place=False)
    expected = gradients(first, plain)
    before = saved_bytes(first, plain)
    torch._dynamo.reset()
    ours = compiled(second, BACKEND, in_place=False)
    saver = save_memory(ours, reduce=0.6)
    assert all(map(torch.equal, gradients(second, ours), expected))
    assert saved_bytes(second, ours) < before
    saver.remove()
    torch._dynamo.reset()
    assert saved_bytes(second, ours) == before


@pytest.mark.parametrize("in_place", [False, True])
def test_the_budget_holds_for_this_model_alone(in_place: bool) -> None:
    budgets = []

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs
        budgets.append(config.activation_memory_budget)
        return graph.forward

    ours = compiled(make(), backend, in_place=in_place)
    saver = save_memory(ours, reduce=0.75)
    ours(torch.ones(16, 32))
    with pytest.raises(RuntimeError):
        ours(torch.ones(3, 5))
    torch._dynamo.reset()
    compiled(make(), backend, in_place=in_place)(torch.ones(16, 32))
    saver.remove()
    torch._dynamo.reset()
    ours(torch.ones(16, 32))
    assert (budgets[0], *budgets[-2:]) == (0.25, 1.0, 1.0)
    assert config.activation_memory_budget == 1.0
    assert "compiled" in saver.notes[0]
    assert saver.plan is None
    assert saver.held_bytes is None


@pytest.mark.parametrize(
    "option",
    [
        {"budget": "2GB"},
        {"max_slowdown": 0.05},
        {"batch": "2x"},
        {"dry_run": True},
        {"lossy": "bf16"},
    ],
)
def test_targets_that_the_compiler_does_not_know_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="reduce="):
        save_memory(compiled(make(), "eager", in_place=True), **option)
