"""Inner modules carry hooks only while a plan asks about them."""

from __future__ import annotations

import copy

import torch
from torch import nn

from stepscope.fix import save_memory
from stepscope.fix.saved.memory_saver import ModuleHooks


def hooked(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if name and (module._forward_pre_hooks or module._forward_hooks)
    ]


def test_what_an_earlier_plan_needed_is_taken_away() -> None:
    seen: list[tuple[str, nn.Module]] = []
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    hooks = ModuleHooks(
        lambda module, _args: seen.append(("enters", module)),
        lambda module, _args, _output: seen.append(("leaves", module)),
    )
    hooks.keep_on({first, second}, {first})
    hooks.keep_on({second}, {second})
    for module in (first, second):
        module(torch.ones(1, 2))
    assert seen == [("enters", second), ("leaves", second)]


def net() -> nn.Module:
    """Products whose inputs are kept, with activations between them that are recomputed."""
    torch.manual_seed(0)
    active = (nn.Linear(16, 16), nn.GELU())
    products = [nn.Linear(16, 16) for _ in range(8)]
    return nn.Sequential(*products[:4], *active, *products[4:])


def train(model: nn.Module, steps: int = 5) -> None:
    for _ in range(steps):
        model(torch.ones(32, 16)).sum().backward()


def test_a_saver_that_is_removed_leaves_no_hooks() -> None:
    model = net()
    saver = save_memory(model)
    train(model)
    assert hooked(model)
    saver.remove()
    assert not hooked(model)
    assert not model._forward_pre_hooks


def test_a_copy_has_hooks_of_its_own() -> None:
    model = net()
    saver = save_memory(model)
    train(model)
    twin = copy.deepcopy(model)
    saver.remove()
    train(twin)
    assert hooked(twin)
    assert not hooked(model)
