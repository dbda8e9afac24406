"""Memory runs out in forward, backward or the optimizer: the array is halved, no step is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.fix.fuse import SplitArray, fuse_to_fit, largest_array
from stepscope.fix.fuse.optimizer import ArrayOptimizer
from stepscope.fix.fuse.split_array import _train_copies, fit_line
from stepscope.fix.memory_meters import meter_on

MODELS, STEPS = 5, 4


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Dropout(0.3), Watched(), nn.Flatten(),
        nn.Linear(64, 3),
    )  # fmt: skip


class Watched(nn.Module):
    """Runs out of memory where a test says so."""

    ask: ClassVar[Callable[[Any], None]] = lambda _result: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = functional.relu(x)
        Watched.ask(result)
        return result


def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def made(
    limit: int | None = None, kind: type[torch.optim.Optimizer] = torch.optim.Adam
) -> SplitArray:
    models = []
    for seed in range(MODELS):
        torch.manual_seed(seed)
        models.append(net().double())
    own = [
        kind(one.parameters(), lr=0.01 * (1 + place))  # type: ignore[call-arg]
        for place, one in enumerate(models)
    ]
    return fuse_to_fit(models, own, seeds=list(range(MODELS)), memory_limit=limit)


def batches(count: int = 6) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (
            [torch.randn(count, 2, 6, 6, generator=draw).double() for _ in range(MODELS)],
            torch.arange(count) % 3,
        )
        for _ in range(STEPS)
    ]


def train(array: SplitArray) -> torch.Tensor:
    return torch.stack([array.train_step(loss, x, y, clip=1.0) for x, y in batches()])


def states(array: SplitArray) -> list[dict[str, torch.Tensor]]:
    return [array.state_of(place) for place in range(len(array))]


class Allocator:
    """Has room for so many models in a step's chosen part, from a chosen step on."""

    def __init__(self, most: int, begins: int) -> None:
        self.most, self.left = most, begins
        self.raised = 0

    def ask(self, models: int) -> None:
        self.left -= 1
        if self.left < 0 and models > self.most:
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@contextmanager
def short_of_memory(where: str, allocator: Allocator, monkeypatch: Any) -> Iterator[None]:
    def in_forward(result: Any) -> None:
        allocator.ask(result.count)

    def in_backward(result: Any) -> None:
        result.physical.register_hook(lambda _gradient: allocator.ask(result.count))

    with monkeypatch.context() as patch:
        if where == "forward":
            patch.setattr(Watched, "ask", in_forward)
        elif where == "backward":
            patch.setattr(Watched, "ask", in_backward)
        else:
            patch.setattr(ArrayOptimizer, "step", _torn(allocator))
        yield


def _torn(allocator: Allocator) -> Callable[..., None]:
    """Half of the weights are updated when memory runs out."""
    whole = ArrayOptimizer.step

    def step(self: ArrayOptimizer, skipped: Any = None) -> None:
        whole(self, skipped)
        allocator.ask(len(self.optimizers))

    return step


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam])
@pytest.mark.parametrize("begins", [0, 2])
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_an_array_without_memory_is_halved_and_trains_the_same(
    where: str, begins: int, kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = made(kind=kind)
    losses = train(expected)
    array, allocator = made(kind=kind), Allocator(most=2, begins=begins)
    with short_of_memory(where, allocator, monkeypatch):
        torch.testing.assert_close(train(array), losses, rtol=1e-10, atol=1e-12)
    assert allocator.raised == 2
    assert [len(one) for one in array.arrays] == [2, 1, 2]
    assert array.report()["halvings"][0].startswith(f"step {begins + 1}: out of memory with 5")
    for ours, theirs in zip(states(array), states(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_what_does_not_fit_alone_says_so_and_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    array = made()
    before = states(array)
    with (
        short_of_memory("optimizer", Allocator(0, 0), monkeypatch),
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        train(array)
    assert raised.value.__notes__ == ["model 0 alone does not fit"]
    for ours, theirs in zip(states(array), before, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.isfinite(train(array)).all()


def test_other_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="should be the same"):
        made().train_step(lambda model, x: model(x), torch.zeros(2, 2, 6, 6))


def test_models_of_halves_leave_and_join(monkeypatch: pytest.MonkeyPatch) -> None:
    array, control = made(), made()
    with short_of_memory("forward", Allocator(2, 0), monkeypatch):
        train(array)
    train(control)
    for one in (array, control):
        one.evict(1)
        one.evict(3)
        torch.manual_seed(9)
        new = net().double()
        one.admit(new, torch.optim.Adam(new.parameters(), lr=0.02), seed=9)
    x, y = batches()[0]
    ours, theirs = (one.train_step(loss, x[:4], y) for one in (array, control))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_checkpoint_keeps_how_the_array_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    array = made()
    with short_of_memory("forward", Allocator(2, 0), monkeypatch):
        train(array)
    saved = copy.deepcopy(array.checkpoint())
    again = made()
    again.resume(saved)
    assert [len(one) for one in again.arrays] == [2, 1, 2]
    assert torch.equal(train(again), train(array))
    with pytest.raises(UsageError, match="5 models"):
        fuse_to_fit([nn.Linear(2, 2)], []).resume(saved)


def test_models_whose_batches_differ_in_shape_step_apart() -> None:
    array, alone = made(), [made() for _ in range(MODELS)]
    sizes = [6, 4, 6, 4, 5]
    for x, _ in batches():
        own = [one[:size] for one, size in zip(x, sizes, strict=True)]
        labels = [torch.arange(size) % 3 for size in sizes]
        ours = array.train_step(loss, own, labels)
        theirs = [
            one.train_step(loss, own[place], labels[place])[place]
            for place, one in enumerate(alone)
        ]
        torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-10, atol=1e-12)
    for place, one in enumerate(alone):
        torch.testing.assert_close(
            array.state_of(place), one.state_of(place), rtol=1e-8, atol=1e-10
        )


def test_the_line_through_measured_peaks() -> None:
    fit = fit_line({1: 150, 2: 200, 4: 300}, 1000)
    assert (fit.fixed_bytes, fit.model_bytes, fit.models) == (100, 50, 18)
    assert fit.low == (920 - 100) // 50
    assert fit.high == 20
    assert fit_line({1: 150}, 1000).models == 1
    assert fit_line({1: 1500}, 1000).models == fit_line({}, 1000).models == 0


def wide() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    return model, torch.optim.Adam(model.parameters()), torch.randn(128, 64)


def square(model: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(x), x)


def test_the_largest_array_is_known_before_it_trains() -> None:
    model, optimizer, x = wide()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    fit = largest_array(model, optimizer, square, x, memory=64 << 20)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert not optimizer.state
    assert 1 < fit.low <= fit.models <= fit.high
    weights = sum(one.nbytes for one in model.parameters())
    assert fit.model_bytes > 4 * weights  # itself, gradient, two states of Adam; activations
    # The same steps that it measures with fewer models.
    train = partial(_train_copies, fit.models, model, optimizer, square, (x,))
    real = meter_on(torch.device("cpu"))(train)[1]
    assert abs(real - fit.memory_bytes) < 0.1 * fit.memory_bytes
    with pytest.raises(UsageError, match="memory=0"):
        largest_array(model, optimizer, square, x, memory=0)


def test_a_limit_cuts_the_array_before_the_first_step() -> None:
    pairs = [wide() for _ in range(5)]
    fit = largest_array(*pairs[0][:2], square, pairs[0][2], memory=4 << 20)
    assert fit.low == 4, "the test wants an array that has to be cut"
    array = fuse_to_fit([one[0] for one in pairs], [one[1] for one in pairs], memory_limit=4 << 20)
    array.train_step(square, [one[2] for one in pairs])
    assert [len(one) for one in array.arrays] == [3, 2]
    assert array.halvings == []
