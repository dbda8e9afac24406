"""ScanRNN, ScanGRU and ScanLSTM are torch's modules: same outputs, same gradients, any options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

from stepscope.errors import RefusedError
from stepscope.fix.scan import ScanGRU, ScanLSTM, ScanRNN, scan_backward
from stepscope.fix.scan import gated_layer as step_jacobians
from stepscope.fix.scan.affine_maps import SecondDerivativeError
from stepscope.fix.scan.gated_layer import gated_layer, gated_layer_backward

GATED: dict[str, Any] = {"gru": (nn.GRU, ScanGRU), "lstm": (nn.LSTM, ScanLSTM)}
CELLS: dict[str, Any] = {"rnn": (nn.RNN, ScanRNN), **GATED}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"batch_first": True},
    {"num_layers": 3},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
]
RELU: list[dict[str, Any]] = [
    {"nonlinearity": "relu"},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "nonlinearity": "relu"},
]
STEPS, BATCH, FEATURES, SIZE = 19, 3, 4, 5


@pytest.fixture(params=[None, 1, 4], ids=["one chunk", "chunks of 1", "chunks of 4"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_jacobians, "usual_chunk", lambda one: request.param or len(one))


def twins(cell: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    plain, ours = (make(FEATURES, SIZE, **options).double() for make in CELLS[cell])
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def doubles(*shape: int, learned: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=learned)


def initial_state(plain: Any) -> tuple[torch.Tensor, ...]:
    layers = plain.num_layers * (2 if plain.bidirectional else 1)
    return tuple(doubles(layers, BATCH, SIZE) for _ in range(1 + isinstance(plain, nn.LSTM)))


def everything(rnn: nn.Module, inputs: Any, state: Any, leaves: list[Any]) -> list[Any]:
    """Outputs and gradients, of a loss at every step and at the end."""
    states, last = rnn(inputs, None if state is None else state if len(state) > 1 else state[0])
    ends = last if isinstance(last, tuple) else (last,)
    data = getattr(states, "data", states)
    every = torch.arange(data.numel(), dtype=torch.float64).view_as(data).sin()
    loss = (data * every).sum() + sum((one**3).sum() for one in ends)
    return [data, *ends, *torch.autograd.grad(loss, [*leaves, *rnn.parameters()])]


def assert_equal(ours: list[Any], plain: list[Any]) -> None:
    assert [one.shape for one in ours] == [one.shape for one in plain]
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def assert_same(cell: str, options: dict[str, Any]) -> None:
    plain, ours = twins(cell, **options)
    inputs = doubles(STEPS, BATCH, FEATURES, learned=False)
    inputs = inputs.transpose(0, 1).contiguous() if plain.batch_first else inputs
    inputs.requires_grad_()
    state = initial_state(plain)
    given = (inputs, state, [inputs, *state])
    assert_equal(everything(ours, *given), everything(plain, *given))


@pytest.mark.parametrize("options", [*OPTIONS, {"bidirectional": True}, *RELU], ids=str)
def test_outputs_and_gradients_of_a_plain_rnn_are_those_of_torch(options: dict[str, Any]) -> None:
    assert_same("rnn", options)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cell", GATED)
def test_outputs_and_gradients_are_those_of_torch(cell: str, options: dict[str, Any]) -> None:
    assert_same(cell, options)


@pytest.mark.parametrize("lengths", [(19, 4, 11), (1, 19, 1), (19, 19, 2), (7, 19, 1)])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_packed_sequences_of_different_lengths(
    cell: str, options: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    plain, ours = twins(cell, **options)
    padded, state, found = doubles(STEPS, BATCH, FEATURES), initial_state(plain), []
    for rnn in (ours, plain):
        packed = pack_padded_sequence(padded, torch.tensor(lengths), enforce_sorted=False)
        found.append(everything(rnn, packed, state, [padded, *state]))
    assert_equal(*found)


@pytest.mark.parametrize("cell", CELLS)
def test_a_packed_sequence_that_is_sorted_comes_back_as_one(cell: str) -> None:
    plain, ours = twins(cell)
    packed = pack_sequence([doubles(n, FEATURES, learned=False) for n in (5, 3, 1)])
    states, _ = ours(packed)
    assert states.sorted_indices is None
    assert states.batch_sizes.tolist() == packed.batch_sizes.tolist()
    assert_equal(everything(ours, packed, None, []), everything(plain, packed, None, []))


@pytest.mark.parametrize("cell", CELLS)
def test_one_sequence_without_a_batch(cell: str) -> None:
    plain, ours = twins(cell, num_layers=2)
    given = ((inputs := doubles(STEPS, FEATURES)), None, [inputs])
    assert_equal(everything(ours, *given), everything(plain, *given))


@pytest.mark.parametrize("cell", CELLS)
def test_only_the_last_state_has_a_loss(cell: str) -> None:
    inputs, found = doubles(STEPS, BATCH, FEATURES, learned=False), []
    for rnn in twins(cell):
        _, last = rnn(inputs)
        end = last[1] if isinstance(last, tuple) else last
        found.append(list(torch.autograd.grad(end.sin().sum(), list(rnn.parameters()))))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("cell", CELLS)
def test_more_steps_than_cudnn_takes(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses more than 65535."""
    home = "rnn_layer" if cell == "rnn" else "gated_layer"
    monkeypatch.setattr(f"stepscope.fix.scan.{home}.MOST_STEPS", 5)
    plain, ours = twins(cell)
    given = ((inputs := doubles(STEPS, BATCH, FEATURES)), initial_state(plain), [inputs])
    assert_equal(everything(ours, *given), everything(plain, *given))


@pytest.mark.parametrize(
    ("forget", "steps"),
    [(4.0, 512), (9.0, 512), (30.0, 512), pytest.param(9.0, 4096, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("cell", GATED)
def test_a_long_memory_in_single_precision(cell: str, forget: float, steps: int) -> None:
    """Gates that forget hardly anything, and gates that are shut, on the same states: how far torch
    itself is off is mostly the forward pass's doing."""
    plain = twins(cell)[0].float()
    with torch.no_grad():
        plain.bias_ih_l0[SIZE : 2 * SIZE] = forget  # a GRU's update gate, an LSTM's forget gate
    inputs, own = torch.randn(steps, 2, FEATURES), torch.randn(steps, 2, SIZE)
    initial = torch.zeros(2, SIZE if cell == "gru" else 2 * SIZE)
    weights = [one.detach() for one in plain.parameters()]
    states = gated_layer(inputs, initial, *weights, cell)
    given = [*states, inputs, initial, *weights]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_jacobians, "usual_chunk", lambda _: 32)
        found = gated_layer_backward(own, None, *given, cell, True)
    exact = [one.double() for one in given]
    right = gated_layer_backward(own.double(), None, *exact, cell, True)
    for a, b in zip(found, right, strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(b.norm())


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("cell", GATED)
def test_a_gradient_that_grows_stays_finite_where_torchs_does(cell: str) -> None:
    """The Jacobians' products leave the range of a float; the gradient is zero there."""
    plain, ours = (one.float() for one in twins(cell))
    with torch.no_grad():
        for rnn in (plain, ours):
            rnn.weight_hh_l0.mul_(200)
    inputs = torch.zeros(STEPS * 20, 1, FEATURES)
    every = torch.zeros(STEPS * 20, 1, SIZE)
    every[0] = 1
    right, found = (
        torch.autograd.grad((rnn(inputs)[0] * every).sum(), list(rnn.parameters()))
        for rnn in (plain, ours)
    )
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cell", CELLS)
def test_parameters_state_dict_and_dropout_stay(cell: str) -> None:
    plain, _ = twins(cell, num_layers=2, dropout=0.5)
    ours = scan_backward(plain)
    assert type(ours) is CELLS[cell][1]
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert all(a is b for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    inputs = doubles(STEPS, BATCH, FEATURES, learned=False)
    assert not torch.equal(ours(inputs)[0], ours(inputs)[0])
    torch.testing.assert_close(ours.eval()(inputs)[0], plain.eval()(inputs)[0], rtol=0, atol=0)


def test_the_same_seed_makes_the_same_weights() -> None:
    torch.manual_seed(3)
    plain = nn.RNN(4, 5, num_layers=2)
    torch.manual_seed(3)
    ours = ScanRNN(4, 5, num_layers=2)
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))
    plain.load_state_dict(ours.state_dict())


def test_a_model_keeps_its_parameters_and_its_optimizer() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(7, 4), "rnn": nn.RNN(4, 5), "head": nn.Linear(5, 2)}
    )
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scan_backward(model)
    assert isinstance(model["rnn"], ScanRNN)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    weight = model["rnn"].weight_hh_l0.detach().clone()
    model["rnn"](torch.randn(6, 2, 4))[0].sum().backward()
    optimizer.step()
    assert not torch.equal(weight, model["rnn"].weight_hh_l0)


def test_training_goes_the_same_way() -> None:
    """Twenty steps of both: the same losses up to rounding."""
    torch.manual_seed(0)
    plain = nn.RNN(3, 8)
    ours = scan_backward(copy.deepcopy(plain), precision="fp32")
    inputs, wanted = torch.randn(40, 5, 3), torch.randn(40, 5, 8)
    losses: list[list[float]] = []
    for rnn in (plain, ours):
        optimizer = torch.optim.Adam(rnn.parameters(), lr=0.01)
        losses.append([])
        for _ in range(20):
            loss = (rnn(inputs)[0] - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_inside_a_model_an_lstm_stays_on_a_cpu() -> None:
    model = nn.Sequential(nn.GRU(3, 4), nn.LSTM(4, 4))
    assert scan_backward(model) is model
    assert [type(one) for one in model] == [ScanGRU, nn.LSTM]
    with pytest.raises(RefusedError, match="Move the model to its GPU first"):
        scan_backward(nn.Sequential(nn.LSTM(3, 4)))
    elsewhere = nn.Sequential(nn.LSTM(3, 4, device="meta"), nn.LSTM(4, 4, proj_size=2))
    scan_backward(elsewhere)
    assert [type(one) for one in elsewhere] == [ScanLSTM, nn.LSTM]


@pytest.mark.parametrize("cell", CELLS)
def test_a_second_derivative_is_refused(cell: str) -> None:
    _, ours = twins(cell)
    inputs = doubles(9, 2, FEATURES)
    (gradient,) = torch.autograd.grad(ours(inputs)[0].sum(), inputs, create_graph=True)
    with pytest.raises(SecondDerivativeError, match="second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("cell", GATED)
def test_weights_of_16_bits_and_autocast(cell: str) -> None:
    plain, ours = (one.float() for one in twins(cell))
    inputs = torch.randn(STEPS, BATCH, FEATURES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, _ = ours(inputs.bfloat16())
    assert states.dtype == torch.float32
    with pytest.raises(ValueError, match="Convert one of them"):
        ours(inputs.double())
    small = CELLS[cell][1].of(plain.bfloat16())
    states, _ = small(inputs.bfloat16())
    states.sum().backward()
    assert states.dtype == small.weight_hh_l0.grad.dtype == torch.bfloat16


def test_what_does_not_fit_is_said() -> None:
    for kind, name in ((ScanRNN, "RNN"), (ScanGRU, "GRU")):
        with pytest.raises(RefusedError, match=rf"an nn\.{name} itself, not LSTM"):
            kind.of(nn.LSTM(3, 4))
    with pytest.raises(RefusedError, match="precision is one of"):
        scan_backward(nn.RNN(3, 4), precision="fp8")
    with pytest.raises(RefusedError, match="proj_size=2"):
        ScanLSTM(3, 4, proj_size=2)
    rnn, lstm = twins("rnn")[1], twins("lstm")[1]
    inputs, state = doubles(3, 2, FEATURES), doubles(1, 2, SIZE)
    with pytest.raises(ValueError, match="input is"):
        rnn(doubles(3, 2, 9))
    with pytest.raises(ValueError, match="the initial state is"):
        rnn(inputs, doubles(2, 2, SIZE))
    with pytest.raises(ValueError, match=r"is a pair, \(h_0, c_0\)"):
        lstm(inputs, state)
    with pytest.raises(ValueError, match=r"is \[1, 2, 5\], not \[2, 2, 5\]"):
        lstm(inputs, (torch.cat([state, state]),) * 2)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_compiled_it_gives_the_same(cell: str) -> None:
    plain, ours = twins(cell, num_layers=2)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    inputs, state = doubles(STEPS, BATCH, FEATURES), initial_state(plain)
    given = (inputs, state, [inputs, *state])
    assert_equal(everything(compiled, *given), everything(plain, *given))


@pytest.mark.parametrize("cell", GATED)
def test_the_operators_keep_torchs_rules(cell: str) -> None:
    """Shapes without data, schemas, autograd's registration: what torch.compile relies on."""
    gates, parts = (3, 1) if cell == "gru" else (4, 2)
    sizes = [(7, 2, 3), (2, 4 * parts), (4 * gates, 3), (4 * gates, 4), (4 * gates,), (4 * gates,)]
    given = [doubles(*size) for size in sizes]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(gated_layer, (*given, cell), test_utils=tests)


@pytest.mark.slow
def test_the_operator_of_a_plain_rnn_keeps_torchs_rules() -> None:
    inputs = [
        torch.randn(shape, requires_grad=True) for shape in ((5, 2, 3), (2, 4), (4, 3), (4, 4))
    ]
    torch.library.opcheck(
        torch.ops.stepscope.rnn_layer.default, (*inputs, None, None, True, "fp32")
    )
