"""LSTM, GRU, RNN and their cells: all models step by step, as each would alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from twins import Trained, assert_same, square, train_both

from stepscope.fix.fuse import fuse, fuse_to_fit
from stepscope.fix.fuse.rules import recurrent
from stepscope.fix.fuse.rules.recurrent import LayerWeights, StepOrder, run_steps

KINDS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
STEPS = 50


def sequences() -> tuple[Any, ...]:
    return (torch.randn(5, 7, 4),)


def every_output(result: Any) -> torch.Tensor:
    """A loss to which outputs and last states contribute."""
    output, states = result
    last = states if isinstance(states, tuple) else (states,)
    return square(output) + sum(square(one) for one in last)


def assert_fused(trained: Trained) -> None:
    assert_same(trained)
    report = trained.array.report()
    assert report["one_by_one"] == {}
    assert set(report["functions"]) <= {"fused", "once"}


class Packed(nn.Module):
    """A recurrent layer over sequences of different lengths."""

    def __init__(self, layer: nn.Module, lengths: list[int], **packing: Any) -> None:
        super().__init__()
        self.layer, self.lengths, self.packing = layer, lengths, packing

    def forward(self, x: torch.Tensor) -> Any:
        lengths = torch.tensor(self.lengths)
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, **self.packing)
        output, states = self.layer(packed)
        return rnn.pad_packed_sequence(output, batch_first=True)[0], states


class Decoder(nn.Module):
    """Cells, and a layer that begins from a state."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 3)
        self.first, self.second = nn.LSTMCell(4, 3), nn.GRUCell(3, 3, bias=False)
        self.third = nn.RNNCell(3, 3, nonlinearity="relu")
        self.layer = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = self.start(x[:, 0])
        outputs = torch.zeros(len(x), 3, 3, dtype=x.dtype)
        for place in range(3):
            h, c = self.first(x[:, place], (h, c))
            outputs[:, place] = self.third(self.second(h), h)
        rest, _ = self.layer(x, (h[None], c[None]))
        return torch.cat([outputs, rest], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_trains_as_alone(kind: str) -> None:
    layer = KINDS[kind]
    assert_fused(train_both(lambda: layer(4, 3), sequences, loss=every_output, steps=STEPS))


def test_projections() -> None:
    def build() -> nn.Module:
        return nn.LSTM(4, 6, 2, proj_size=3, bidirectional=True, batch_first=True)

    assert_fused(train_both(build, sequences, loss=every_output, shared=True))


def test_layers_drop_from_each_models_own_stream() -> None:
    shares = iter([0.4, 0.0, 0.1])

    def build() -> nn.Module:
        return nn.GRU(4, 3, 3, dropout=next(shares), batch_first=True, bidirectional=True)

    assert_fused(train_both(build, sequences, loss=every_output))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind: str) -> None:
    layer = KINDS[kind]

    def build() -> nn.Module:
        inner = layer(4, 3, 2, bidirectional=True, batch_first=True, dropout=0.2)
        return Packed(inner, [2, 7, 5, 1, 5], enforce_sorted=False)

    assert_fused(train_both(build, sequences, loss=every_output))


def test_cells_and_initial_states() -> None:
    assert_fused(train_both(Decoder, sequences, steps=10))


def test_packed_batches_of_each_model() -> None:
    models = [nn.LSTM(4, 3).double() for _ in range(2)]
    batches = [
        rnn.pack_sequence([torch.randn(size, 4).double() for size in (5, 3, 1)]) for _ in models
    ]
    array = fuse(models)
    output, (h, _) = array(batches)
    for place, (model, batch) in enumerate(zip(models, batches, strict=True)):
        alone, (theirs, _) = model(batch)
        torch.testing.assert_close(output.data.of(place), alone.data)
        torch.testing.assert_close(h.of(place), theirs)
    assert array.report()["one_by_one"] == {}


@pytest.mark.parametrize("own", [False, True], ids=["shared", "each"])
def test_states_go_to_the_arrays_of_a_split_one(own: bool) -> None:
    models = [nn.LSTM(4, 3) for _ in range(4)]
    array = fuse_to_fit(models, [torch.optim.SGD(one.parameters(), lr=0.0) for one in models])
    x = [torch.randn(5 + place % 2, 2, 4) for place in range(4)]  # two shapes
    state = torch.randn(1, 2, 3)
    h = [torch.randn(1, 2, 3) for _ in models] if own else state
    losses = array.train_step(lambda net, x, h: square(net(x, h)), x, (h, state))
    for place, model in enumerate(models):
        mine = h[place] if isinstance(h, list) else h
        torch.testing.assert_close(losses[place], square(model(x[place], (mine, state))).detach())


class OwnLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        return self.layer(rnn.pack_padded_sequence(x, lengths))[1]


def test_one_batch_and_its_states_for_all_models() -> None:
    models = [nn.LSTM(4, 3) for _ in range(2)]
    packed = rnn.pack_sequence([torch.randn(size, 4) for size in (5, 3, 1)])
    states = torch.randn(1, 3, 3), torch.randn(1, 3, 3)
    own = [torch.randn(1, 3, 3) for _ in models]
    array = fuse(models)
    output, _ = array(packed, states)
    with_own, _ = array(packed, (own, states[1]))
    for place, model in enumerate(models):
        torch.testing.assert_close(output.data.of(place), model(packed, states)[0].data)
        theirs, _ = model(packed, (own[place], states[1]))
        torch.testing.assert_close(with_own.data.of(place), theirs.data)


def test_lengths_may_differ_from_model_to_model() -> None:
    models = [OwnLengths() for _ in range(2)]
    array = fuse(models)
    x = torch.randn(6, 3, 4)
    same, other = torch.tensor([6, 4, 2]), torch.tensor([5, 5, 1])
    for lengths in ([same, same], [same, other]):
        result = array(x, lengths)
        for place, model in enumerate(models):
            torch.testing.assert_close(result.of(place), model(x, lengths[place]))
    assert "differ from model to model" in array.report()["one_by_one"][""]
    assert array.report()["one_by_one_ms"]["modules"][""] > 0


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_the_steps(kind: str, reverse: bool) -> None:
    """Also the gradients of gradients, and of sequences that end or begin on the way."""
    torch.manual_seed(1)
    gates = {"lstm": 4, "gru": 3}.get(kind, 1) * 2
    order = StepOrder(kind, (3, 2, 2, 1), reverse)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)

    projection = made(2, 2) if kind == "lstm" else None
    bias = made(gates) if kind == "gru" else None
    given = [made(8, gates), made(gates, 2), bias, projection, made(3, 2)]
    given += [made(3, 2)] if kind == "lstm" else []

    def run(*tensors: Any) -> Any:
        rows, last = run_steps(order, tensors[0], LayerWeights(*tensors[1:4]), tensors[4:])
        return rows, *last

    assert torch.autograd.gradcheck(run, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


def test_the_faster_way_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("stepscope.fix.fuse.kernel_choice._LEAST_WORK", 0)
    models = [nn.LSTM(4, 3, 2, batch_first=True) for _ in range(2)]
    x = torch.randn(5, 40, 4)
    ways = (recurrent._STEPS, recurrent._ONE_BY_ONE)
    for fastest in ways:
        monkeypatch.setattr("stepscope.fix.fuse.kernel_choice.fastest", lambda *_, way=fastest: way)
        array = fuse(copy.deepcopy(models), choose="measure")
        for length in (40, 30):
            output, _ = array(x[:, :length])
            for place, model in enumerate(models):
                torch.testing.assert_close(output.of(place), model(x[:, :length])[0])
        assert list(array.report()["choices"].values()) == [fastest]  # one for both lengths
        way = "fused" if fastest == ways[0] else "one by one"
        assert array.report()["functions"][way]["lstm"] == 2
        for file in tmp_path.rglob("*"):
            if file.is_file():
                file.unlink()


def test_every_way_computes_the_same() -> None:
    models = [nn.GRU(4, 3, bidirectional=True) for _ in range(2)]
    seen: list[Any] = []

    class Watch:
        def pick(self, operator: Any) -> str:
            seen.append({name: way(*operator.tensors) for name, way in operator.ways().items()})
            return str(operator.usual)

    array = fuse(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "chooser", Watch)
        array(torch.randn(6, 5, 4))
        array([torch.randn(6, 5, 4), torch.randn(6, 5, 4)])
    assert len(seen) == 2
    for results in seen:
        torch.testing.assert_close(*results.values())


def test_a_nan_stays_in_its_model() -> None:
    models = [nn.LSTM(4, 3, 2) for _ in range(3)]
    with torch.no_grad():
        models[1].weight_hh_l0.fill_(float("nan"))
    array = fuse(models)
    x = torch.randn(5, 2, 4)
    array.backward(array(x)[0].square().mean())
    gradients = dict(array.named_parameters())["weight_ih_l1"].grad
    assert gradients is not None
    assert [bool(one.isnan().any()) for one in gradients] == [False, True, False]


@pytest.mark.slow
def test_a_compiled_layer() -> None:
    models = [nn.GRU(4, 3) for _ in range(2)]
    array = fuse(models, draws="together")
    compiled = array.compile(lambda x: array(x)[0].square().mean(), backend="aot_eager")
    x = torch.randn(4, 2, 4)
    array.backward(compiled(x))
    grown = [one.grad.clone() for one in array.parameters() if one.grad is not None]
    array.zero_grad()
    array.backward(array.apply_each(lambda x: array(x)[0].square().mean(), x))
    for ours, theirs in zip(grown, array.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad)


def random_layer(draw: random.Random) -> Callable[[], nn.Module]:
    kind = draw.choice(list(KINDS))
    settings: dict[str, Any] = {
        "num_layers": draw.randint(1, 3),
        "bidirectional": draw.random() < 0.5,
        "bias": draw.random() < 0.7,
        "dropout": draw.choice([0.0, 0.3]),
        "batch_first": True,
    }
    if kind == "lstm" and draw.random() < 0.5:
        settings["proj_size"] = 2
    if kind == "rnn":
        settings["nonlinearity"] = draw.choice(["tanh", "relu"])
    lengths = [draw.randint(1, 7) for _ in range(5)]
    packs = draw.random() < 0.5

    def build() -> nn.Module:
        layer: nn.Module = KINDS[kind](4, 3, **settings)
        return Packed(layer, lengths, enforce_sorted=False) if packs else layer

    return build


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.parametrize("seed", range(40))
def test_random_layers(seed: int) -> None:
    draw = random.Random(seed)
    build, count, shared = random_layer(draw), draw.randint(1, 4), draw.random() < 0.3
    trained = train_both(
        build, sequences, loss=every_output, count=count, shared=shared, steps=STEPS
    )
    assert_fused(trained)
