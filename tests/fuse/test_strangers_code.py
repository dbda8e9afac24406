"""Models whose code does what rules do not expect: each still trains as it would alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from twins import Trained, assert_same, train_both

from stepscope.errors import UsageError
from stepscope.fix.fuse import ArrayScaler, Stacked, fuse


def rows() -> tuple[torch.Tensor]:
    return (torch.randn(5, 4),)


class Rows(nn.Module):
    """A layer whose code is the subclass's own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(4, 4)


class Swish(torch.autograd.Function):
    """The backward pass is wrong on purpose: it must be the one that is used."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0] * torch.sigmoid(context.saved_tensors[0])


class WithOwnBackward(Rows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,bj->bij", Swish.apply(self.rows(x)), x)


class Averages(Rows):
    """Assigns to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rows(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


class AveragesAlone(Averages):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + abs(self.rows(x).sum().item()))


class Experts(nn.Module):
    """An expert that no row chooses gets no gradient, and its optimizer does not move it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero().flatten()
            if len(places):
                out = out.index_add(0, places, expert(x[places]))
        return out


class WritesIntoNew(Rows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.zeros(len(x), 3, 4, dtype=x.dtype)
        for place in range(3):
            steps[:, place] = self.rows(x) * place
        shared = torch.zeros_like(x)
        shared[0] += self.rows.bias
        return steps + shared[:, None]


class WritesIntoViews(Rows):
    """What is written to a part of a new tensor is in the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.ones(4, dtype=x.dtype)
        parts = torch.full((len(x), 3, 4), 0.5, dtype=x.dtype)
        second, flat = parts[:, 1], parts.view(-1, 4)
        second.add_(self.rows(x))
        flat[:5].mul_(self.rows.bias)
        parts[:, 2] += self.rows(x) * self.kept
        like = torch.zeros_like(x)
        like[1:][0].copy_(self.rows(x)[1])
        return parts + like[:, None]


class RandomDepth(Rows):
    """Draws with a function that gets no tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(len(x), 1, dtype=x.dtype) < 0.5
        return x + self.rows(x) * kept


class AsksForAgreement(Rows):
    """All models answer alike at first, and differently later."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.drop(self.norm(self.rows(x)))
        if self.calls > 2 and self.rows.bias[0] > 0:
            y = 2 * y
        return y


class JoinsWithNothing(Rows):
    """As caches of keys begin: an empty tensor of one dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.rows(x)[None]
        return torch.cat([torch.tensor([], dtype=x.dtype), y], dim=-2)


def parametrized() -> nn.Module:
    parametrizations = nn.utils.parametrizations
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.ELU(),
        parametrizations.weight_norm(nn.Linear(4, 2)),
    )


FUSED = {
    "a backward pass of its own": WithOwnBackward,
    "buffers that are assigned to": Averages,
    "drawn from nothing": RandomDepth,
    "joined with nothing": JoinsWithNothing,
    "parametrized": parametrized,
    "a new tensor is written to": WritesIntoNew,
    "a part of a new tensor is written to": WritesIntoViews,
}
ALONE = {
    "buffers that are assigned to, alone": (AveragesAlone, "item"),
    "experts": (Experts, "nonzero"),
    "models disagree later": (AsksForAgreement, "__bool__"),
}


@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("name", FUSED)
def test_code_that_is_fused(name: str, shared: bool) -> None:
    trained = train_both(FUSED[name], rows, shared=shared, steps=6)
    assert_same(trained)
    assert trained.array.report()["one_by_one"] == {}


@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("name", ALONE)
def test_code_that_each_model_runs_by_itself(name: str, shared: bool) -> None:
    build, why = ALONE[name]
    trained = train_both(build, rows, shared=shared, steps=8)
    assert_same(trained)
    assert why in trained.array.report()["one_by_one"][""]


def test_a_weight_that_a_model_leaves_out_has_a_count_of_its_own() -> None:
    trained = train_both(Experts, rows, steps=8)
    twin = torch.optim.Adam(trained.twins[0].parameters())
    assert trained.array.optimizer is not None
    own = trained.array.optimizer.export(0)
    twin.load_state_dict(own)
    steps = [int(state["step"]) for state in own["state"].values()]
    assert max(steps) == 8 > min(steps)


def made_of(slope: float) -> nn.Module:
    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"slopes": [slope]}
            self.rows = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.leaky_relu(self.rows(x), self.config["slopes"][0])

    return Configured()


class Hidden(nn.Module):
    """What differs is private, a tensor, or never asked for."""

    def __init__(self, gain: float, *, asks: bool) -> None:
        super().__init__()
        self.name, self.rate, self._gain = f"model {gain}", 1e-3 * gain, torch.tensor([gain])
        self._asks = asks
        self.rows = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rows(x)
        return y * self._gain if self._asks else y


def trained_with(build: Any) -> Trained:
    numbers = count(1)
    return train_both(lambda: build(float(next(numbers))), rows)


def test_settings_that_differ_are_found_at_any_depth() -> None:
    kinds: dict[float, nn.Module] = {}
    first = type(made_of(0.0))

    def build(number: float) -> nn.Module:
        model = kinds.setdefault(number, made_of(0.1 * number))
        model.__class__ = first  # one class; its slope is in `config`
        return model

    trained = trained_with(build)
    assert_same(trained)
    assert trained.array.report()["one_by_one"] == {"": "config differs from model to model"}


def test_a_private_tensor_that_differs_is_each_models_own() -> None:
    trained = trained_with(lambda number: Hidden(number, asks=True))
    assert_same(trained)
    assert trained.array.report()["one_by_one"] == {"": "_gain differs from model to model"}


def test_what_no_code_asks_for_costs_nothing() -> None:
    trained = trained_with(lambda number: Hidden(number, asks=False))
    assert_same(trained)
    assert trained.array.report()["one_by_one"] == {}


@dataclass
class Answer:
    rows: torch.Tensor
    largest: float


class AnswersWithNumbers(Rows):
    def forward(self, x: torch.Tensor) -> Answer:
        y = self.rows(x)
        return Answer(y, y.max().item())


def test_objects_and_numbers_of_each_model_come_out() -> None:
    models = [AnswersWithNumbers() for _ in range(3)]
    x = torch.randn(5, 4)
    answer = fuse(models)(x)
    for place, model in enumerate(models):
        alone = model(x)
        torch.testing.assert_close(answer.rows.of(place), alone.rows)
        assert answer.largest[place] == alone.largest


def test_an_error_of_the_models_code_is_the_one_that_is_seen() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3)) for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(5x4 and"):
        fuse(models)(torch.randn(5, 4))


class Checkpointed(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(share), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result


def test_checkpointed_modules() -> None:
    assert_same(train_both(lambda: Checkpointed(0.0), rows))
    models = [Checkpointed(0.5) for _ in range(2)]
    array = fuse(models)
    with pytest.raises(UsageError, match='draws="together"'):
        array.backward(array(torch.randn(5, 4)).mean())
    array = fuse(models, draws="together")
    loss = array(torch.randn(5, 4)).mean()
    array.backward(loss)  # torch sets its own numbers back


def test_a_missing_module_is_named() -> None:
    with pytest.raises(UsageError, match="2 is a Tanh, not missing"):
        fuse([nn.Sequential(nn.Linear(2, 2), nn.ReLU(), *more) for more in ((), (nn.Tanh(),))])


def test_losses_go_back_by_themselves() -> None:
    models = [nn.Linear(4, 1) for _ in range(2)]
    array = fuse(models)
    x = torch.randn(5, 4)
    functional.mse_loss(array(x), torch.zeros(5, 1)).backward()
    alone = functional.mse_loss(models[1](x), torch.zeros(5, 1))
    (wanted,) = torch.autograd.grad(alone, [models[1].weight])
    torch.testing.assert_close(array.get_parameter("weight").grad[1], wanted)


def test_a_state_dict_is_one_models() -> None:
    array = fuse([nn.Linear(4, 1) for _ in range(2)])
    assert torch.equal(array.state_dict(1)["weight"], array[1].weight)
    with pytest.raises(UsageError, match=r"array\.checkpoint\(\)"):
        array.state_dict()


def test_clipping_says_what_is_missing() -> None:
    array = fuse([nn.Linear(4, 1) for _ in range(2)])
    with pytest.raises(UsageError, match="no gradient"):
        array.clip_grad_norm_(1.0)
    array.backward(array(torch.randn(3, 4)).mean())
    with pytest.raises(UsageError, match="3 limits for 2 models"):
        array.clip_grad_norm_([1.0, 2.0, 3.0])


def test_models_come_and_go_with_scaler_and_schedulers() -> None:
    models = [nn.Linear(4, 1) for _ in range(3)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    plans = [torch.optim.lr_scheduler.StepLR(one, 1) for one in optimizers]
    array, scaler = fuse(models, optimizers, plans), ArrayScaler(3)

    def step() -> None:
        loss = array(torch.ones(3, 4)).square().mean()
        array.zero_grad()
        array.backward(scaler.scale(loss))
        scaler.step(array)
        scaler.update()
        array.step_schedulers()

    step()
    assert array.evict(-1) is models[2]
    assert [array[place] for place in range(len(array))] == models[:2]
    with pytest.raises(UsageError, match=r"scaler\.evict"):
        step()
    scaler.evict(2)
    new = nn.Linear(4, 1)
    array.admit(new, torch.optim.SGD(new.parameters(), lr=0.1))  # without a scheduler
    scaler.admit()
    step()
    array.resume(array.checkpoint())
    rates = [one.param_groups[0]["lr"] for one in array.optimizer.optimizers]
    assert rates == pytest.approx([0.001, 0.001, 0.1])
    for place in (3, -4):
        with pytest.raises(UsageError, match="there is no model"):
            array.evict(place)


def test_tensors_that_code_keeps_outlive_an_eviction() -> None:
    models = [WritesIntoViews() for _ in range(3)]
    array = fuse(models)
    x = torch.randn(5, 4)
    array(x)
    array.evict(1)
    torch.testing.assert_close(array(x).of(1), models[2](x))


def test_losses_can_be_printed() -> None:
    array = fuse([nn.Linear(1, 1) for _ in range(2)])
    array.load(0, {"weight": torch.tensor([[2.0]]), "bias": torch.zeros(1)})
    array.load(1, {"weight": torch.tensor([[3.0]]), "bias": torch.zeros(1)})
    loss = array(torch.ones(4, 1)).mean()
    assert f"{loss:.1f}" == "[2.0, 3.0]"
    assert f"{loss}" == "Stacked(2 models, shape=(), dtype=torch.float32)"


def test_inputs_of_different_shapes_are_refused() -> None:
    array = fuse([nn.Linear(2, 2) for _ in range(2)])
    with pytest.raises(UsageError, match="inputs differ in shape"):
        array([torch.zeros(3, 2), torch.zeros(4, 2)])


def test_stacked_inputs_fit_the_array() -> None:
    array = fuse([nn.Linear(4, 1) for _ in range(2)])
    batches = torch.randn(2, 5, 4)
    apart = array([batches[0], batches[1]])
    torch.testing.assert_close(array(Stacked(batches, 2)).front(), apart.front())
    with pytest.raises(UsageError, match="a Stacked of 3 models, but 2 models are fused"):
        array(Stacked(torch.randn(3, 5, 4), 3))


@pytest.mark.parametrize("wrong", [7, -1])
def test_a_word_that_no_model_has_is_not_its_neighbours(wrong: int) -> None:
    array = fuse([nn.Embedding(7, 2) for _ in range(3)])
    good = torch.tensor([0, 6])
    with pytest.raises(UsageError, match=f"an embedding of 7 rows was asked for row {wrong}"):
        array([torch.tensor([0, wrong]), good, good])
