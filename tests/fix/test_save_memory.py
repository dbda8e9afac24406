"""save_memory: plans, targets, and every way in which a training may differ from one plain step."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_nets import same_bits
from saved_trainings import deterministic as deterministic
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.fix import save_memory
from stepscope.fix.saved import MemorySaver, SavePlan

pytestmark = pytest.mark.usefixtures("deterministic")
Training = Callable[[nn.Module, torch.Tensor], list[torch.Tensor]]


class Block(nn.Module):
    """Of a ResNet, with its in-place operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norms[0](self.first(x)), inplace=True)
        y = self.norms[1](self.second(y))
        y += x
        return functional.relu(y, inplace=True)


class AttentionDecoder(nn.Module):
    """Additive attention before every step of an LSTM: T x T x N values from T x N."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2 * size, size)
        self.keys, self.query = nn.Linear(size, size), nn.Linear(size, size)
        self.score, self.norm = nn.Linear(size, 1), nn.LayerNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.keys(x)
        state = (x.new_zeros(x.shape[0], x.shape[2]),) * 2
        outputs = []
        for t in range(x.shape[1]):
            energies = torch.tanh(self.norm(self.query(state[0])[:, None] + keys))
            weights = torch.softmax(self.score(energies).squeeze(-1), -1)
            context = (weights[:, None] @ x).squeeze(1)
            state = self.cell(torch.cat([x[:, t], context], -1), state)
            outputs.append(state[0])
        return torch.stack(outputs, 1)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    layers = [
        layer
        for _ in range(4)
        for layer in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(16))
    ]
    return nn.Sequential(*layers, nn.Linear(16, 4)), torch.randn(8, 16)


def resnet() -> tuple[nn.Module, torch.Tensor]:
    stem = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    )
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(*stem, Block(8), Block(8), *head), torch.randn(4, 3, 12, 12)


def vgg() -> tuple[nn.Module, torch.Tensor]:
    convolutions = (
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    )
    head = (nn.Flatten(), nn.Linear(72, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 4))
    return nn.Sequential(*convolutions, *head), torch.randn(4, 3, 12, 12)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layers = [
        nn.TransformerEncoderLayer(16, 2, 64, activation="gelu", batch_first=True) for _ in range(2)
    ]
    return nn.Sequential(*layers), torch.randn(4, 12, 16)


def seq2seq() -> tuple[nn.Module, torch.Tensor]:
    return AttentionDecoder(16), torch.randn(4, 10, 16)


def steps(model: nn.Module, x: torch.Tensor, count: int = 4) -> list[torch.Tensor]:
    """Ordinary training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for number in range(count):
        optimizer.zero_grad()
        loss = model(x + number / 10).square().mean()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return seen


def assert_exact(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], train: Training, **options: Any
) -> MemorySaver:
    """Train plainly and with save_memory; everything is the same to the last bit."""
    results = []
    for save in (False, True):
        torch.manual_seed(0)
        model, x = make()
        saver = save_memory(model, **options) if save else None
        seen = train(model, x)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([*seen, *gradients, *model.state_dict().values()])
    assert same_bits(*results)
    assert saver is not None
    return saver


def with_plan(saver: MemorySaver) -> SavePlan:
    assert saver.plan is not None
    return saver.plan


NETS = [(mlp, 1.5), (resnet, 1.4), (vgg, 3), (transformer, 1.5), (seq2seq, 3)]


@pytest.mark.few(3)
@pytest.mark.parametrize(("make", "at_least"), NETS)
def test_training_is_exact_and_holds_what_was_planned(make: Any, at_least: float) -> None:
    check_training(make, at_least, count=6)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "at_least"), NETS)
def test_twenty_steps_are_exact(make: Any, at_least: float) -> None:
    check_training(make, at_least, count=20)


def check_training(make: Any, at_least: float, *, count: int) -> None:
    saver = assert_exact(make, lambda model, x: steps(model, x, count))
    plan = with_plan(saver)
    assert saver.notes == []
    assert saver.held_bytes == pytest.approx(plan.saved_bytes, rel=0.03)  # zeros vary
    assert plan.saved_bytes_before / plan.saved_bytes > at_least
    assert plan.saved_bytes <= plan.peak_bytes < plan.peak_bytes_before


def test_before_is_what_a_plain_pass_keeps() -> None:
    torch.manual_seed(0)
    model, x = resnet()
    saver = save_memory(model, warmup=0, dry_run=True)
    storages = {}
    model(x)
    saver.remove()
    owned = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    counted = sum(s.nbytes() for address, s in storages.items() if address not in owned)
    assert with_plan(saver).saved_bytes_before == counted


def accumulated(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    for number in range(6):
        model(x + number).square().mean().backward()
    return []


def several_forwards(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(4):
        (model(x) * model(x * 2) + model(x - 1)).square().mean().backward()
    return []


def twice_backward(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    return []


def second_derivative(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    seen = []
    for _ in range(4):
        x = x.detach().requires_grad_()
        loss = model(x).tanh().square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        seen.append(slope.detach())
    return seen


def bfloat16(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        output.float().square().mean().backward()
    return []


def evaluated_in_between(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    seen = []
    for _ in range(4):
        model(x).square().mean().backward()
        model.eval()
        with torch.no_grad():
            seen.append(model(x))
        model(x).sum().backward()
        model.train()
    return seen


def checkpointed_reentrant(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(4):
        x = x.detach().requires_grad_()
        checkpoint(model, x, use_reentrant=True).square().mean().backward()
    return []


def two_shapes(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    for number in range(8):
        model(x[: 2 + number % 2]).square().mean().backward()
    return []


TRAININGS = (
    accumulated,
    several_forwards,
    twice_backward,
    second_derivative,
    bfloat16,
    evaluated_in_between,
    checkpointed_reentrant,
    two_shapes,
)

NO_BF16 = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch says so on some CPUs


@pytest.mark.few(4)
@NO_BF16
@pytest.mark.parametrize("train", TRAININGS)
def test_a_convolutional_net_trains_in_other_ways(train: Training) -> None:
    saver = assert_exact(vgg, train)
    plan = with_plan(saver)
    assert plan.saved_bytes < plan.saved_bytes_before
    assert saver.notes == []


@NO_BF16
@pytest.mark.slow
@pytest.mark.parametrize("make", [resnet, seq2seq, mlp, transformer])
@pytest.mark.parametrize("train", TRAININGS)
def test_other_nets_train_in_other_ways(make: Any, train: Training) -> None:
    if train is second_derivative and make is transformer:
        pytest.skip("torch has no second derivative of its fused attention")
    saver = assert_exact(make, train)
    assert saver.notes == []


def test_hooks_around_the_model_go_first() -> None:
    def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(4):
            y = x.detach().requires_grad_()
            checkpoint(model, y, use_reentrant=False).square().mean().backward()
        return []

    saver = assert_exact(vgg, train)
    assert saver.plan is None
    assert "hooks are active around the model" in saver.notes[0]


class Branching(nn.Module):
    """Data decide how often a layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x[0, 0])):
            x = functional.gelu(self.layer(x))
        return torch.tanh(self.layer(x))


def branches(counts: list[int]) -> Training:
    def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        for count in counts:
            x = x.clone()
            x[0, 0] = count
            model(x).square().mean().backward()
        return []

    return train


def test_a_pass_that_differs_keeps_the_rest_and_says_so() -> None:
    saver = assert_exact(lambda: (Branching(), torch.rand(4, 8)), branches([2, 2, 2, 3, 1, 2, 2]))
    assert any("differed from the recorded one" in note for note in saver.notes)
    assert not any("in a row" in note for note in saver.notes)


def test_a_plan_that_never_fits_is_given_up() -> None:
    saver = assert_exact(lambda: (Branching(), torch.rand(4, 8)), branches([2, 2, 3, 1, 3, 2]))
    assert any("3 passes in a row differed" in note for note in saver.notes)


def test_a_plan_for_each_shape_up_to_a_limit() -> None:
    def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        for rows in range(1, 11):
            model(torch.cat([x, x])[:rows]).square().mean().backward()
        return []

    saver = assert_exact(mlp, train, warmup=0)
    assert any("kinds of input shapes" in note for note in saver.notes)


def test_what_backward_needs_may_not_change_in_place() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8))
    save_memory(model, warmup=0)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    loss = model(x).sum()
    with torch.no_grad():
        model[2].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"in-?place operation"):
        loss.backward()


def test_an_error_in_forward_leaves_the_next_pass_alone() -> None:
    model, x = mlp()
    saver = save_memory(model, warmup=0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes"):
            model(x[:, :5])
        model(x).sum().backward()
    assert saver.held_bytes == pytest.approx(with_plan(saver).saved_bytes, rel=0.03)


def test_everything_is_freed_after_backward() -> None:
    model, x = resnet()
    saver = save_memory(model, warmup=0)
    model(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        inputs = x.clone()
        storage = inputs.untyped_storage()._weak_ref()
        output = model(inputs)
        del inputs
        assert not torch.UntypedStorage._expired(storage)
        output.sum().backward()
        del output
        assert torch.UntypedStorage._expired(storage), "held after backward, without a collection"
    finally:
        gc.enable()
        torch.UntypedStorage._free_weak_ref(storage)
    assert saver.held_bytes is not None


def test_plans_survive_pickle_and_json() -> None:
    first = with_plan(assert_exact(resnet, steps))
    assert pickle.loads(pickle.dumps(first)) == first
    assert SavePlan.from_json(first.to_json()) == first
    saver = assert_exact(resnet, steps, plan=SavePlan.from_json(first.to_json()))
    assert saver.plan == first
    assert saver.held_bytes == pytest.approx(first.saved_bytes, rel=0.03)  # zeros vary


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 2}', '{"schema": 1, "uses": 3}'])
def test_something_else_is_not_a_plan(text: str) -> None:
    with pytest.raises(UnreadableInputError, match="not a plan"):
        SavePlan.from_json(text)


def test_dry_run_makes_the_plan_and_changes_nothing() -> None:
    saver = assert_exact(seq2seq, steps, dry_run=True)
    plan = with_plan(saver)
    assert saver.held_bytes is None
    assert str(plan).startswith("Backward needs ")
    assert "recompute" in str(plan)
    assert "tanh" in str(plan)


def test_targets() -> None:
    least = with_plan(assert_exact(resnet, steps))
    some = with_plan(assert_exact(resnet, steps, reduce=0.1))
    assert least.peak_bytes <= some.peak_bytes <= 0.9 * some.peak_bytes_before
    budget = with_plan(assert_exact(resnet, steps, budget=f"{least.peak_bytes_before / 1e3}KB"))
    assert budget.peak_bytes == budget.peak_bytes_before
    assert budget.extra_ns == 0
    impossible = with_plan(assert_exact(resnet, steps, budget=1000))
    assert any("out of reach" in note for note in impossible.notes)
    free = with_plan(assert_exact(resnet, steps, max_slowdown=0))
    assert free.extra_ns == 0


def test_the_loss_can_be_part_of_the_plan() -> None:
    def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        saver = save_memory(model, warmup=0) if not savers else savers[0]
        for _ in range(3):
            with saver.forward(x):
                loss = functional.cross_entropy(model(x), torch.arange(8) % 4)
            loss.backward()
        savers.append(saver)
        return [loss.detach()]

    savers: list[MemorySaver] = []
    torch.manual_seed(0)
    model, x = mlp()
    (loss,) = train(model, x)
    assert savers[0].held_bytes == pytest.approx(with_plan(savers[0]).saved_bytes, rel=0.03)
    assert "log_softmax" in str(savers[0].plan)
    torch.manual_seed(0)
    model, x = mlp()
    for _ in range(3):
        plain = functional.cross_entropy(model(x), torch.arange(8) % 4)
    assert torch.equal(loss, plain)


def test_removed_it_is_gone() -> None:
    model, x = mlp()
    saver = save_memory(model, warmup=0)
    saver.remove()
    model(x).sum().backward()
    assert saver.plan is None


@pytest.mark.parametrize(
    "options",
    [{"reduce": 1.5}, {"budget": "many"}, {"budget": -3}, {"max_slowdown": -1}, {"warmup": -1}],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        save_memory(nn.Linear(2, 2), **options)


def test_models_that_cannot_be_handled_are_refused() -> None:
    with pytest.raises(UsageError, match="not function"):
        save_memory(mlp)  # type: ignore[arg-type]
