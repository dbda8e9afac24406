"""heavy=True: matrix products and convolutions may be repeated, and training is still the same."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from random_nets import RandomNet, same_bits
from saved_trainings import trained
from torch import nn

from stepscope.fix import save_memory
from stepscope.fix.saved import MemorySaver, recorder

if TYPE_CHECKING:
    from collections.abc import Callable

PRODUCTS = ("aten.addmm.default", "aten.mm.default", "aten.bmm.default", "aten.convolution.default")


def repeated_products(saver: MemorySaver) -> int:
    plan = saver.plan
    assert plan is not None
    return sum(plan.operators[one.operator] in PRODUCTS for one in plan.repeated)


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 128, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())] * 8
    return nn.Sequential(*(copy.deepcopy(block) for block in blocks))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "shape"), [(transformer, (4, 16, 32)), (convolutions, (4, 8, 12, 12))]
)
def test_products_are_repeated_only_where_that_is_asked_for(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    plain = trained(make(), lambda: torch.randn(shape), rate=0.02)
    usual, heavy = make(), make()
    usual_saver, heavy_saver = save_memory(usual), save_memory(heavy, heavy=True)
    assert same_bits(plain, trained(usual, lambda: torch.randn(shape), rate=0.02))
    assert same_bits(plain, trained(heavy, lambda: torch.randn(shape), rate=0.02))
    assert repeated_products(usual_saver) == 0
    assert repeated_products(heavy_saver) > 0
    assert usual_saver.plan is not None
    assert heavy_saver.plan is not None
    assert heavy_saver.plan.peak_bytes < usual_saver.plan.peak_bytes
    assert heavy_saver.notes == []


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(6))
def test_random_nets_with_repeated_products(seed: int) -> None:
    def net() -> RandomNet:
        torch.manual_seed(seed)
        return RandomNet(seed)

    plain = trained(net(), lambda: torch.randn(3, 5, 6, 6), rate=0.02)
    usual, heavy = net(), net()
    usual_saver, heavy_saver = save_memory(usual), save_memory(heavy, heavy=True)
    assert same_bits(plain, trained(usual, lambda: torch.randn(3, 5, 6, 6), rate=0.02))
    assert same_bits(plain, trained(heavy, lambda: torch.randn(3, 5, 6, 6), rate=0.02))
    assert usual_saver.plan is not None
    assert heavy_saver.plan is not None
    assert heavy_saver.plan.peak_bytes <= usual_saver.plan.peak_bytes


def test_a_product_that_differs_when_repeated_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "same_bits", lambda *_: torch.tensor(False))
    net = transformer()
    saver = save_memory(net, heavy=True)
    trained(net, lambda: torch.randn(4, 16, 32), steps=3, rate=0.02)
    assert repeated_products(saver) == 0


def test_products_cost_time_that_a_limit_counts() -> None:
    """A plan for 1% cannot hold products that take most of a step."""
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    saver = save_memory(net, max_slowdown=0.01, heavy=True, dry_run=True)
    for _ in range(4):
        net(torch.randn(512, 256)).sum().backward()
    assert saver.plan is not None
    assert saver.plan.extra_ns <= 0.01 * saver.plan.step_ns
