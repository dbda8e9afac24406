"""ScanRNN is nn.RNN: same outputs, same gradients, whatever its options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

from stepscope.errors import RefusedError
from stepscope.fix.scan import ScanRNN, scan_backward
from stepscope.fix.scan.affine_maps import SecondDerivativeError

OPTIONS: list[dict[str, Any]] = [
    {},
    {"nonlinearity": "relu"},
    {"bias": False},
    {"batch_first": True},
    {"num_layers": 3},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "nonlinearity": "relu"},
]
STEPS, BATCH, FEATURES, SIZE = 19, 3, 4, 5


def twins(**options: Any) -> tuple[nn.RNN, ScanRNN]:
    torch.manual_seed(1)
    plain = nn.RNN(FEATURES, SIZE, **options).double()
    ours = ScanRNN(FEATURES, SIZE, **options).double()
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def everything(rnn: nn.Module, inputs: Any, initial: Any, leaves: list[Any]) -> list[Any]:
    """Outputs and gradients, of a loss at every step and at the end."""
    states, last = rnn(inputs, initial)
    data = getattr(states, "data", states)
    every = torch.arange(data.numel(), dtype=torch.float64).view_as(data).sin()
    loss = (data * every).sum() + (last**3).sum()
    return [data, last, *torch.autograd.grad(loss, [*leaves, *rnn.parameters()])]


def assert_equal(ours: list[Any], plain: list[Any]) -> None:
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_and_gradients_are_those_of_torch(options: dict[str, Any]) -> None:
    plain, ours = twins(**options)
    layers = plain.num_layers * (2 if plain.bidirectional else 1)
    inputs = torch.randn(STEPS, BATCH, FEATURES, dtype=torch.float64)
    inputs = inputs.transpose(0, 1).contiguous() if plain.batch_first else inputs
    inputs.requires_grad_()
    initial = torch.randn(layers, BATCH, SIZE, dtype=torch.float64, requires_grad=True)
    given = (inputs, initial, [inputs, initial])
    assert_equal(everything(ours, *given), everything(plain, *given))


@pytest.mark.parametrize("lengths", [(19, 4, 11), (1, 19, 1), (19, 19, 2)])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_packed_sequences(options: dict[str, Any], lengths: tuple[int, ...]) -> None:
    plain, ours = twins(**options)
    inputs = torch.randn(STEPS, BATCH, FEATURES, dtype=torch.float64, requires_grad=True)
    both = []
    for rnn in (ours, plain):
        packed = pack_padded_sequence(inputs, torch.tensor(lengths), enforce_sorted=False)
        both.append(everything(rnn, packed, None, [inputs]))
    assert_equal(*both)


def test_a_packed_sequence_that_is_sorted_comes_back_as_one() -> None:
    _, ours = twins()
    packed = pack_sequence([torch.zeros(n, FEATURES, dtype=torch.float64) for n in (5, 3, 1)])
    states, _ = ours(packed)
    assert states.sorted_indices is None
    assert states.batch_sizes.tolist() == packed.batch_sizes.tolist()


def test_one_sequence_without_a_batch() -> None:
    plain, ours = twins(num_layers=2)
    inputs = torch.randn(STEPS, FEATURES, dtype=torch.float64, requires_grad=True)
    assert_equal(
        everything(ours, inputs, None, [inputs]), everything(plain, inputs, None, [inputs])
    )


def test_the_same_seed_makes_the_same_weights() -> None:
    torch.manual_seed(3)
    plain = nn.RNN(4, 5, num_layers=2)
    torch.manual_seed(3)
    ours = ScanRNN(4, 5, num_layers=2)
    plain.load_state_dict(ours.state_dict())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, dict(ours.named_parameters())[name])


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


def test_dropout_between_layers_is_drawn_in_training_alone() -> None:
    ours = ScanRNN(4, 5, num_layers=2, dropout=0.5)
    inputs = torch.randn(6, 2, 4)
    assert not torch.equal(ours(inputs)[0], ours(inputs)[0])
    ours.eval()
    assert torch.equal(ours(inputs)[0], ours(inputs)[0])


def test_a_second_derivative_is_refused() -> None:
    _, ours = twins()
    inputs = torch.randn(9, 2, FEATURES, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(ours(inputs)[0].sum(), inputs, create_graph=True)
    with pytest.raises(SecondDerivativeError, match="second derivative"):
        gradient.sum().backward()


def test_what_is_no_plain_rnn_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"an nn\.RNN itself, not LSTM"):
        ScanRNN.of(nn.LSTM(3, 4))
    with pytest.raises(RefusedError, match="precision is one of"):
        scan_backward(nn.RNN(3, 4), precision="fp8")


def test_shapes_that_do_not_fit_are_said() -> None:
    _, ours = twins()
    with pytest.raises(ValueError, match="input is"):
        ours(torch.zeros(3, 2, 9, dtype=torch.float64))
    with pytest.raises(ValueError, match="the initial state is"):
        ours(torch.zeros(3, 2, 4, dtype=torch.float64), torch.zeros(2, 2, 5, dtype=torch.float64))


@pytest.mark.slow
def test_torch_compile_takes_it_whole() -> None:
    ours = ScanRNN(4, 5)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    inputs = torch.randn(9, 2, 4)
    compiled(inputs)[0].sum().backward()
    gradients = [parameter.grad.clone() for parameter in ours.parameters()]
    ours.zero_grad()
    ours(inputs)[0].sum().backward()
    for a, b in zip(gradients, ours.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad)


@pytest.mark.slow
def test_torchs_own_check_of_operators() -> None:
    inputs = [
        torch.randn(shape, requires_grad=True) for shape in ((5, 2, 3), (2, 4), (4, 3), (4, 4))
    ]
    torch.library.opcheck(
        torch.ops.stepscope.rnn_layer.default, (*inputs, None, None, True, "fp32")
    )
