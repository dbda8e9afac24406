"""Models in an array: looked at, saved, evicted, admitted, broken, and computed one by one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from twins import assert_same, seeded, step, step_alone, train_both

from stepscope.errors import UsageError
from stepscope.fix.fuse import ArrayScaler, ModelArray, fuse


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * width, 4),
    )


def made(count: int = 3) -> ModelArray:
    models = seeded(net, count)
    return fuse(models, [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models])


def train(array: ModelArray, steps: int = 3, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(5, 3, 6, 6, generator=draw)
        losses = step(array, functional.cross_entropy(array(x), torch.arange(5) % 4))
    return losses


def test_each_model_is_a_window_into_the_array() -> None:
    array = made()
    before = array.state_of(1)
    train(array)
    x = torch.randn(2, 3, 6, 6)
    array.eval()
    torch.testing.assert_close(array[1](x), array(x).of(1))
    assert not torch.equal(before["0.weight"], array.state_of(1)["0.weight"])
    exported = array.export(1)
    train(array.train())
    assert not torch.equal(exported.state_dict()["0.weight"], array.state_of(1)["0.weight"])


def test_a_model_that_leaves_is_as_it_was_and_the_others_train_on() -> None:
    array, control = made(), made()
    train(array)
    train(control)
    states = [array.state_of(place) for place in range(3)]
    gone = array.evict(1)
    assert len(array) == 2
    for name, value in gone.state_dict().items():
        assert torch.equal(value, states[1][name])
    after = train(array, seed=1)
    torch.testing.assert_close(after, train(control, seed=1)[[0, 2]])
    for name, value in gone.state_dict().items():
        assert torch.equal(value, states[1][name]), "it still trains"


def test_a_model_that_leaves_trains_on_alone_with_its_own_optimizer() -> None:
    array, control = made(), made()
    train(array)
    train(control)
    optimizer = array.optimizer.optimizers[1]  # type: ignore[union-attr]
    gone = array.evict(1)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(5, 3, 6, 6, generator=draw)
        loss = step_alone(optimizer, functional.cross_entropy(gone(x), torch.arange(5) % 4))
    torch.testing.assert_close(loss, train(control, seed=1)[1], rtol=1e-4, atol=1e-5)


def test_a_new_model_trains_as_if_it_were_alone() -> None:
    array = made()
    train(array)
    torch.manual_seed(7)
    new = net()
    alone = copy.deepcopy(new)
    place = array.admit(new, torch.optim.Adam(new.parameters(), lr=1e-2))
    assert place == 3
    others = fuse([alone], [torch.optim.Adam(alone.parameters(), lr=1e-2)])
    torch.testing.assert_close(train(array, seed=1)[3], train(others, seed=1)[0])


def test_a_state_is_loaded_into_one_model() -> None:
    array = made()
    state = array.state_of(0)
    array.load(2, state)
    assert all(torch.equal(value, array.state_of(2)[name]) for name, value in state.items())
    assert not torch.equal(state["0.weight"], array.state_of(1)["0.weight"])


def test_nan_in_one_model_does_not_touch_its_neighbours() -> None:
    array, control = made(), made()
    with torch.no_grad():
        array[1].get_parameter("0.weight").fill_(float("nan"))
    broken, sound = train(array), train(control)
    assert broken[1].isnan()
    torch.testing.assert_close(broken[[0, 2]], sound[[0, 2]])


class Branches(nn.Module):
    """Decides by a value, which no array can do for all models at once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rows = nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        result: torch.Tensor = self.rows(x) * (2.0 if x[0].sum().item() > 0 else 0.5)
        return result


def test_what_cannot_be_fused_computes_model_by_model() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), Branches(), nn.Linear(4, 2))

    trained = train_both(build, lambda: (torch.randn(5, 6),))
    assert_same(trained)
    report = trained.array.report()
    assert list(report["one_by_one"]) == ["1"]
    assert "item" in report["one_by_one"]["1"]
    assert report["functions"]["fused"]["linear"] >= 2


def test_dropout_may_differ_from_model_to_model() -> None:
    shares = iter([0.1, 0.5, 0.0])
    trained = train_both(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(next(shares))),
        lambda: (torch.randn(5, 6),),
    )
    assert_same(trained)
    assert trained.array.report()["one_by_one"] == {}


def test_another_setting_that_differs_is_computed_one_by_one() -> None:
    slopes = iter([0.1, 0.5, 0.01])
    trained = train_both(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(next(slopes))),
        lambda: (torch.randn(5, 6),),
    )
    assert_same(trained)
    assert "negative_slope" in trained.array.report()["one_by_one"]["1"]


def test_models_that_are_not_alike_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"model 1 is not built like model 0: 0.weight is \[9, 3, 3, 3\]"
    ):
        fuse([net(8), net(9)])
    with pytest.raises(UsageError, match="1 is a Sigmoid, not a ReLU"):
        fuse([nn.Sequential(nn.Linear(2, 2), one) for one in (nn.ReLU(), nn.Sigmoid())])
    with pytest.raises(UsageError, match="given twice"):
        fuse([net()] * 2)
    with pytest.raises(UsageError, match="at least one"):
        fuse([])


def test_the_last_model_stays() -> None:
    with pytest.raises(UsageError, match="last model"):
        made(1).evict(0)


def test_training_goes_on_from_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    array, again = made(), made()
    train(array)
    torch.save(array.checkpoint(), tmp_path / "array.pt")
    straight = train(array, seed=1)
    again.resume(torch.load(tmp_path / "array.pt"))
    assert torch.equal(train(again, seed=1), straight)
    for place in range(3):
        one, other = array.state_of(place), again.state_of(place)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_overflow_in_one_model_skips_its_step_alone() -> None:
    array, control = made(), made()
    scaler = ArrayScaler(3, first_scale=4.0, interval=2)
    draw = torch.Generator().manual_seed(0)
    for number in range(3):
        x = torch.randn(5, 3, 6, 6, generator=draw)
        losses = functional.cross_entropy(array(x), torch.arange(5) % 4)
        array.zero_grad()
        array.backward(scaler.scale(losses))
        if number == 1:
            array.get_parameter("0/weight").grad[1] = float("inf")
        before = array.state_of(1)
        scaler.step(array)
        scaler.update()
        assert torch.equal(before["4.weight"], array.state_of(1)["4.weight"]) == (number == 1)
    assert scaler.scales.tolist() == [8.0, 2.0, 8.0]
    train(control)
    torch.testing.assert_close(array.state_of(0), control.state_of(0))
