"""The pack hook rests where all is kept: nothing is lost, and a pass that differs is noticed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stepscope.fix import save_memory
from stepscope.fix.saved import pinned_follower
from stepscope.fix.saved.follower import is_following
from stepscope.fix.saved.plan_load import ModuleBoundary, PassPlace, plan_pauses


class Tower(nn.Module):
    """A head of kept products, an activation that is worth it, and a tail of kept products."""

    def __init__(self, kept: int = 6) -> None:
        super().__init__()
        self.head = nn.Sequential(*(nn.Linear(8, 8) for _ in range(kept)))
        self.wide = nn.Linear(8, 256)
        self.norm = nn.LayerNorm(256)
        self.narrow = nn.Linear(256, 8)
        self.tail = nn.Sequential(*(nn.Linear(8, 8) for _ in range(kept)))
        self.changed: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        if self.changed == "more before":
            x = x * 2
        x = functional.silu(self.norm(self.wide(x)))
        if self.changed == "another activation":
            x = functional.gelu(x)
        x = self.tail(self.narrow(x))
        if self.changed == "in place":
            self.tail[0].weight.data.mul_(1)
            kept = self.tail[-1](x)
            kept = kept * kept
            x.add_(1)
            return kept
        return x


def loss_and_gradients(model: nn.Module, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward(**options)
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(model: nn.Module, saved: nn.Module, x: torch.Tensor) -> bool:
    ours, plain = loss_and_gradients(saved, x), loss_and_gradients(model, x)
    return len(ours) == len(plain) and all(map(torch.equal, ours, plain))


def followed_tower(**shape: int) -> tuple[Tower, Tower, Any, torch.Tensor]:
    torch.manual_seed(0)
    plain = Tower(**shape)
    saved = copy.deepcopy(plain)
    saver = save_memory(saved, warmup=0)
    x = torch.randn(4, 8)
    for _ in range(5):
        assert same(plain, saved, x)
    assert saver.notes == []
    return plain, saved, saver, x


def packed_in_a_pass(saved: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    numbers: list[int] = []
    pack = pinned_follower.PinnedFollower.pack

    def counting(self: Any, tensor: torch.Tensor) -> Any:
        numbers.append(self._packed)
        return pack(self, tensor)

    monkeypatch.setattr(pinned_follower.PinnedFollower, "pack", counting)
    saved(x)
    monkeypatch.undo()
    return len(numbers)


def test_kept_tensors_before_and_after_do_not_reach_the_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, saved, saver, x = followed_tower(kept=20)
    assert len(saver.plan.uses) > 80
    assert 0 < packed_in_a_pass(saved, x, monkeypatch) < 10


@pytest.mark.parametrize("change", ["more before", "another activation"])
def test_a_pass_that_differs_is_noticed(change: str) -> None:
    plain, saved, saver, x = followed_tower()
    plain.changed = saved.changed = change
    assert same(plain, saved, x)
    assert "a pass differed" in saver.notes[0]
    plain.changed = saved.changed = None
    for _ in range(4):
        assert same(plain, saved, x)
    assert len(saver.notes) == 1


def test_a_kept_tensor_that_was_changed_in_place_raises_as_in_plain_torch() -> None:
    plain, saved, _, x = followed_tower()
    plain.changed = saved.changed = "in place"
    for model in (plain, saved):
        with pytest.raises(RuntimeError, match=r"in-?place"):
            loss_and_gradients(model, x)


def test_a_source_that_was_changed_in_place_raises() -> None:
    """The norm and silu are recomputed from the norm's input, which the hook has seen."""
    _, saved, _, x = followed_tower()
    seen: list[torch.Tensor] = []
    saved.wide.register_forward_hook(lambda _module, _args, output: seen.append(output))
    loss = saved(x).sum()
    with torch.no_grad():
        seen[0].mul_(2)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        loss.backward()


def test_backward_twice_and_second_derivatives() -> None:
    plain, saved, saver, x = followed_tower()
    found = []
    for model in (plain, saved):
        value = x.clone().requires_grad_()
        for _ in range(4 if model is saved else 1):  # inputs with a gradient have their own plan
            loss = model(value).square().mean()
            (first,) = torch.autograd.grad(loss, value, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), value, retain_graph=True)
            (again,) = torch.autograd.grad(loss, value)
        found.append((first.detach(), second, again))
    assert all(map(torch.equal, *found))
    assert saver.notes == []


class Checkpointed(nn.Module):
    """The middle has hooks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Tower(), Tower(), Tower()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.middle, self.first(x), use_reentrant=False)
        return self.last(x)


def test_checkpointing_inside_keeps_its_hooks() -> None:
    torch.manual_seed(0)
    plain = Checkpointed()
    saved = copy.deepcopy(plain)
    saver = save_memory(saved, warmup=0)
    x = torch.randn(4, 8)
    for _ in range(6):
        assert same(plain, saved, x)
    assert saver.notes == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_hooks_that_surround_a_module_only_later_are_noticed() -> None:
    """Where the hook should go on, another one is active."""
    plain, saved, saver, x = followed_tower()
    inner = saved.forward

    def surrounded(value: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return inner(value)

    saved.forward = surrounded  # type: ignore[method-assign]
    assert same(plain, saved, x)
    assert "other saved-tensor hooks" in saver.notes[0]
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_saver_inside_another_one_leaves_it_alone_where_the_hook_rests() -> None:
    torch.manual_seed(0)
    plain = Tower()
    saved = copy.deepcopy(plain)
    outer, inner = save_memory(saved, warmup=0), save_memory(saved.tail, warmup=0)
    x = torch.randn(4, 8)
    for _ in range(6):
        assert same(plain, saved, x)
    assert outer.notes == []
    assert inner.plan is None
    assert not is_following()


def test_an_error_in_the_middle_takes_the_hook_away() -> None:
    _, saved, saver, x = followed_tower()
    handle = saved.narrow.register_forward_pre_hook(_fails)
    with pytest.raises(ValueError, match="stop"):
        saved(x)
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not is_following()
    loss_and_gradients(saved, x)
    assert saver.notes == []


def _fails(*_: Any) -> None:
    raise ValueError("stop")


class Images(nn.Module):
    """What is saved lies in memory in one way; what it is recomputed through follows the input."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3, 2, 1) for _ in range(6))
        self.heads = nn.ModuleList(nn.Linear(36, 4) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for convolution, head in zip(self.convolutions, self.heads, strict=True):
            total = total + head(functional.silu(convolution(x)).sum(1).tanh().flatten(1))
        return total


def test_another_memory_format_is_noticed() -> None:
    torch.manual_seed(0)
    plain = Images()
    saved = copy.deepcopy(plain)
    saver = save_memory(saved, warmup=0)
    x = torch.randn(2, 3, 6, 6)
    for _ in range(4):
        assert same(plain, saved, x)
    assert saver.notes == []
    assert same(plain, saved, x.to(memory_format=torch.channels_last))
    assert "lies in memory in another way" in saver.notes[0]
    assert same(plain, saved, x)


def test_the_statistics_of_norms_are_kept_where_they_are_negligible() -> None:
    torch.manual_seed(0)
    width = 2048
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(6)]
    plain = nn.Sequential(*layers)
    saved = copy.deepcopy(plain)
    saver = save_memory(saved, warmup=0)
    x = torch.randn(32, width)
    for _ in range(4):
        assert same(plain, saved, x)
    assert saver.notes == []
    assert saver.plan is not None
    assert saver.held_bytes is not None
    more_bytes = saver.held_bytes - saver.plan.saved_bytes
    assert 0 < more_bytes <= 0.001 * saver.plan.saved_bytes_before


def boundary(module: str, uses: int, *, entering: bool = True, call: int = 0) -> ModuleBoundary:
    return ModuleBoundary((module, call), entering, PassPlace(uses, uses))


def test_the_hook_goes_on_at_the_last_boundary_before_the_next_needed_tensor() -> None:
    boundaries = [boundary("a", 2), boundary("b", 5), boundary("c", 9)]
    pauses = plan_pauses([1, 7], boundaries)
    assert not pauses.begins_paused  # nothing tells where tensor 1 is near
    assert pauses.after == {1, 7}
    assert pauses.ends_at_entry == {("b", 0): PassPlace(5, 5)}


def test_a_pause_of_one_tensor_is_not_worth_a_module_hook() -> None:
    assert plan_pauses([0, 2], [boundary("a", 2)]).after == {2}


def test_a_module_that_calls_itself_tells_no_place() -> None:
    twice = [boundary("a", 3), boundary("a", 4)]
    assert plan_pauses([5], twice).ends_at_entry == {}
    assert not plan_pauses([5], twice).begins_paused


def test_nothing_to_do_needs_no_hook() -> None:
    pauses = plan_pauses([], [boundary("a", 3)])
    assert pauses.begins_paused
    assert pauses.ends_at_entry == {}
