"""Norms made again from their statistics: the same bits, in one pass, with what follows."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from random_nets import same_bits
from saved_trainings import trained as train_steps
from torch import nn

from stepscope.fix import save_memory
from stepscope.fix.saved import norm_recompute, replay
from stepscope.fix.saved.norm_recompute import FUSED, NormForm, NormInputs, normalised
from stepscope.fix.saved.save_plan import SavePlan


class ResidualBlock(nn.Module):
    """Convolution, norm and ReLU twice, the second with the input added."""

    def __init__(self, channels: int, *, inplace: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        if self.relu.inplace:
            y += x
            return self.relu(y)
        return self.relu(x + y)


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return train_steps(model, x, steps=6, rate=0.1)


def net(*, inplace: bool = False, last: bool = False) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    blocks = [ResidualBlock(6, inplace=inplace) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 6, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(4, 3, 14, 14)
    layout = torch.channels_last if last else torch.contiguous_format
    return model.to(memory_format=layout), x.to(memory_format=layout)


def planned() -> SavePlan:
    """For `net()`, after a few of its steps."""
    model, x = net()
    saver = save_memory(model)
    trained(model, x)
    assert saver.plan is not None
    return saver.plan


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, str | None]]:
    """Of every norm that backward made again: whether something was added, and which activation
    was done."""
    noted: list[tuple[bool, str | None]] = []

    def noting(form: str, inputs: NormInputs, *, residual: torch.Tensor | None = None,
               activation: str | None = None) -> torch.Tensor:  # fmt: skip
        noted.append((residual is not None, activation))
        return normalised(form, inputs, residual=residual, activation=activation)

    monkeypatch.setattr(replay, "normalised", noting)
    return noted


def exact_here() -> bool:
    """Whether this machine's batch norm rounds as one of the forms does."""
    x = torch.randn(4, 6, 14, 14)
    result = torch.ops.aten.native_batch_norm(
        x, torch.rand(6), torch.rand(6), None, None, True, 0.1, 1e-5
    )
    inputs = NormInputs(x, torch.ones(6), torch.zeros(6), *result[1:])
    plain = torch.ops.aten.native_batch_norm(
        x, torch.ones(6), torch.zeros(6), None, None, True, 0.1, 1e-5
    )[0]
    return torch.equal(normalised("shift", inputs), plain)


needs_exact = pytest.mark.skipif(
    not exact_here(), reason="this processor's batch norm rounds in another order"
)


@pytest.mark.few(2)
@needs_exact
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_training_is_exact_and_what_follows_is_done_in_the_same_pass(
    times: list[tuple[bool, str | None]], inplace: bool, last: bool
) -> None:
    plain = trained(*net(inplace=inplace, last=last))
    model, x = net(inplace=inplace, last=last)
    saver = save_memory(model)
    saved = trained(model, x)
    assert same_bits(plain, saved)
    assert saver.notes == []
    assert saver.plan is not None
    assert {(False, "relu"), (True, "relu")} <= set(times)
    assert {call.again for call in saver.plan.repeated} >= {"shift", FUSED}


@needs_exact
def test_statistics_are_always_kept() -> None:
    """They are what the result is made from."""
    plan = planned()
    assert any(call.again == "shift" for call in plan.repeated)
    small = [use for use in plan.uses if use.shape == (6,)]
    assert {use.action for use in small} == {"keep"}


@needs_exact
def test_the_costs_of_rows_add_up_to_what_is_repeated() -> None:
    """A norm whose result nobody reads but the ReLU behind it counts with that; its statistics,
    which are kept, cost nothing."""
    model, x = net()
    saver = save_memory(model)
    trained(model, x)
    assert saver.plan is not None
    record = next(iter(saver._passes.values())).record
    assert record is not None
    repeated_ns = sum(record.operators[call.operator].again_ns for call in saver.plan.repeated)
    recomputed = [row for row in saver.plan.rows if row.action == "recompute"]
    assert sum(row.cost_ns for row in recomputed) == repeated_ns > 0
    assert {row.operator for row in recomputed if "norm" in row.operator} == set()


@needs_exact
def test_a_plan_says_how_and_can_be_read_back(times: list[tuple[bool, str | None]]) -> None:
    model, x = net()
    start = copy.deepcopy(model.state_dict())
    saver = save_memory(model)
    first = trained(model, x)
    saver.remove()
    assert saver.plan is not None
    plan = SavePlan.from_json(saver.plan.to_json())
    assert plan == saver.plan
    model.load_state_dict(start)
    times.clear()
    again = save_memory(model, plan=plan)
    assert same_bits(first, trained(model, x))
    assert again.notes == []
    assert times


@needs_exact
def test_a_plan_from_elsewhere_is_tried_on_the_values_of_here(
    times: list[tuple[bool, str | None]],
) -> None:
    """A library that multiplies and adds in another order made it: this one's order is found."""
    plain, plan = trained(*net()), planned()
    other = replace(
        plan,
        repeated=tuple(
            replace(call, again="apart" if call.again == "shift" else call.again)
            for call in plan.repeated
        ),
    )
    model, x = net()
    times.clear()
    saver = save_memory(model, plan=other)
    assert same_bits(plain, trained(model, x))
    assert saver.notes == []
    assert times


@needs_exact
def test_fresh_weights_do_not_hide_which_order_is_right() -> None:
    """Times 1 and plus 0 most orders give the same bits; they differ after the first update."""
    x, ones, zeros = torch.randn(4, 6, 14, 14) + 1, torch.ones(6), torch.zeros(6)
    arguments = (x, ones, zeros, None, None, True, 0.1, 1e-5)
    result = torch.ops.aten.native_batch_norm.default(*arguments)
    inputs = NormInputs(x, ones, zeros, *result[1:])
    assert torch.equal(normalised("apart", inputs), result[0])
    operator = torch.ops.aten.native_batch_norm.default
    before = torch.get_rng_state()
    assert norm_recompute.form_here("apart", operator, arguments, result) == "shift"
    assert torch.equal(torch.get_rng_state(), before)


def test_where_no_order_of_a_plan_is_right_the_norm_itself_is_repeated(
    monkeypatch: pytest.MonkeyPatch, times: list[tuple[bool, str | None]]
) -> None:
    plain, plan = trained(*net()), planned()
    monkeypatch.setattr(
        norm_recompute, "_in_torch", lambda _form, inputs: inputs.x * inputs.inverse.mean()
    )
    model, x = net()
    times.clear()
    saver = save_memory(model, plan=plan)
    assert same_bits(plain, trained(model, x))
    assert saver.notes == []
    assert times == []


def test_an_order_that_differs_in_one_bit_is_not_used(
    monkeypatch: pytest.MonkeyPatch, times: list[tuple[bool, str | None]]
) -> None:
    def other(form: NormForm, inputs: NormInputs) -> torch.Tensor:
        del form
        centred = inputs.x - inputs.mean.view(1, -1, 1, 1)
        return centred * inputs.inverse.view(1, -1, 1, 1) * 1.0000001

    plain = trained(*net())
    monkeypatch.setattr(norm_recompute, "_in_torch", other)
    norm_recompute._exact_before().clear()
    model, x = net()
    saver = save_memory(model)
    assert same_bits(plain, trained(model, x))
    assert saver.plan is not None
    assert {call.again for call in saver.plan.repeated} == {None}
    assert times == []


@needs_exact
def test_a_norm_that_two_read_is_made_once(times: list[tuple[bool, str | None]]) -> None:
    """Its result goes through a ReLU and into a product: nothing is fused."""

    class TwoReaders(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(4))
            self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for inner, norm in zip(self.inner, self.norms, strict=True):
                y = norm(inner(x))
                x = torch.relu(y) * y
            return x.flatten(1)

    torch.manual_seed(0)
    model, x = TwoReaders(), torch.randn(4, 6, 14, 14)
    twin = copy.deepcopy(model)
    plain = trained(twin, x)
    saver = save_memory(model)
    assert same_bits(plain, trained(model, x))
    assert saver.notes == []
    assert set(times) == {(False, None)}


@needs_exact
def test_backward_twice_over_one_graph() -> None:
    def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        seen = []
        for _ in range(5):
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            seen += [p.grad.clone() for p in model.parameters()]
        return seen

    plain = gradients(*net(inplace=True))
    model, x = net(inplace=True)
    save_memory(model)
    assert same_bits(plain, gradients(model, x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_neighbours_that_share_a_channel(layout: torch.memory_format) -> None:
    x = torch.zeros(2, 3, 4, 5).to(memory_format=layout)
    assert norm_recompute._inner_size(x) == (20 if layout is torch.contiguous_format else 1)
    assert norm_recompute._inner_size(x[:, :2]) is None
    assert norm_recompute._inner_size(torch.zeros(7, 3)) == 1


class PartOfANorm(nn.Module):
    """Adds to half of a norm's result, which lies in the norm's own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half, other = self.norm(self.first(x)).chunk(2)
        summed = half + self.second(x[: len(half)])
        return self.last(torch.relu(summed) * torch.sigmoid(other))


def test_a_part_of_a_norm_is_not_taken_for_all_of_it() -> None:
    torch.manual_seed(0)
    model, x = PartOfANorm(), torch.randn(4, 3, 10, 10)
    other = copy.deepcopy(model)
    plain = trained(model, x)
    save_memory(other)
    assert same_bits(plain, trained(other, x))


class GroupNet(nn.Module):
    """Group norms: one before a ReLU, one before a sigmoid, one that SiLU's backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner, norm, active in zip(self.inner, self.norms, ACTIVE, strict=False):
            x = active(norm(inner(x)))
        return self.inner[3](x).flatten(1)


ACTIVE = (torch.relu, torch.sigmoid, nn.functional.silu)


@needs_exact
def test_group_norms_are_made_again_from_their_statistics(
    times: list[tuple[bool, str | None]],
) -> None:
    torch.manual_seed(0)
    model, x = GroupNet(), torch.randn(4, 8, 14, 14)
    twin = copy.deepcopy(model)
    plain = trained(twin, x)
    saver = save_memory(model)
    assert same_bits(plain, trained(model, x))
    assert saver.notes == []
    assert set(times) == {(False, "relu"), (False, "sigmoid"), (False, None)}


def test_statistics_of_few_elements_are_not_kept_for_this() -> None:
    """Group norms over eight elements each: two statistics would be a quarter of the result."""
    x, ones, zeros = torch.randn(4, 8, 4), torch.ones(8), torch.zeros(8)
    few, many = (
        norm_recompute.norm_inputs(
            torch.ops.aten.native_group_norm.default,
            (x, ones, zeros, 4, 8, 4, groups, 1e-5),
            torch.native_group_norm(x, ones, zeros, 4, 8, 4, groups, 1e-5),
        )
        for groups in (4, 1)
    )
    assert few is None
    assert many is not None
    assert many[0] == "group"
