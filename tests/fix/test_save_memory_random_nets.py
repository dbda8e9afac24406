"""Training with save_memory is the same to the last bit, for nets that nobody wrote."""

from __future__ import annotations

import pytest
import torch
from random_nets import RandomNet, same_bits
from saved_trainings import deterministic as deterministic
from saved_trainings import trained as train_steps

from stepscope.fix import save_memory
from stepscope.fix.saved import MemorySaver

STEPS = 8
pytestmark = pytest.mark.usefixtures("deterministic")


def trained(seed: int, *, save: bool) -> tuple[list[torch.Tensor], MemorySaver | None]:
    torch.manual_seed(seed)
    net = RandomNet(seed)
    saver = save_memory(net) if save else None
    return train_steps(net, lambda: torch.randn(3, 5, 6, 6), STEPS, rate=0.02, seed=seed), saver


def check(seed: int) -> float:
    plain, _ = trained(seed, save=False)
    again, _ = trained(seed, save=False)
    saved, saver = trained(seed, save=True)
    assert saver is not None
    assert saver.plan is not None
    assert same_bits(plain, again), "the training itself is not repeatable"
    assert same_bits(plain, saved), f"net {seed} differs: {saver.plan}"
    assert saver.notes == []
    check_held(saver)
    return saver.plan.saved_bytes_before / max(1, saver.plan.saved_bytes)


def check_held(saver: MemorySaver) -> None:
    """As planned, but for sparse values: how many zeros there are varies, and with too few of them
    the value is kept as it is."""
    plan, held = saver.plan, saver.held_bytes
    assert plan is not None
    if not plan.changes_something():
        assert held is None
        return
    sparse = [row for row in plan.rows if row.action == "encode: sparse"]
    packed = sum(row.held_bytes for row in sparse)
    most = sum(row.size_bytes for row in sparse)
    assert held is not None
    assert plan.saved_bytes - packed <= held <= plan.saved_bytes - packed + most


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
def test_random_net(seed: int) -> None:
    check(seed)


@pytest.mark.slow
def test_a_hundred_random_nets() -> None:
    ratios = [check(seed) for seed in range(4, 104)]
    assert sum(ratio > 1.2 for ratio in ratios) > 50
