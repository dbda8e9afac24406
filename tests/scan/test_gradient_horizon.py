"""How far back a gradient reaches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepscope.errors import RefusedError
from stepscope.fix.scan import ScanRNN, gradient_horizon


def scaled(factor: float, **options: object) -> nn.RNN:
    """Recurrent weights that multiply a gradient by `factor` at each step."""
    rnn = nn.RNN(2, 4, nonlinearity="relu", **options)
    for name, parameter in rnn.named_parameters():
        with torch.no_grad():
            parameter.zero_()
            if "weight_hh" in name:
                parameter.copy_(factor * torch.eye(4))
            elif "bias_ih" in name:
                parameter.fill_(1.0)  # so that relu is open
    return rnn


def test_a_factor_of_a_tenth_reaches_seven_steps_back_by_hand() -> None:
    """1, 0.1, ... 10^-6 are above 10^-7 of the first; the eighth is not."""
    horizon = gradient_horizon(scaled(0.1), torch.randn(50, 3, 2), share=0.999e-7 * 1.01)
    assert (horizon.steps, horizon.of) == (7, 50)
    assert horizon.truncation_pays
    assert "truncate backpropagation to 14 steps" in str(horizon)


def test_a_gradient_that_neither_grows_nor_shrinks_reaches_the_beginning() -> None:
    horizon = gradient_horizon(scaled(1.0), torch.randn(50, 3, 2))
    assert (horizon.steps, horizon.of) == (50, 50)
    assert not horizon.truncation_pays


def test_the_layer_that_reaches_furthest_counts() -> None:
    rnn = scaled(0.1, num_layers=2, bidirectional=True, batch_first=True)
    with torch.no_grad():
        rnn.weight_hh_l1_reverse.copy_(torch.eye(4))
    assert gradient_horizon(rnn, torch.randn(3, 40, 2)).steps == 40


def test_a_fresh_rnn_forgets_within_a_few_dozen_steps() -> None:
    torch.manual_seed(0)
    for rnn in (nn.RNN(1, 20), ScanRNN(1, 20)):
        assert 15 < gradient_horizon(rnn, torch.randn(1000, 4, 1)).steps < 60


def test_a_horizon_of_what_has_none() -> None:
    inputs = torch.randn(30, 2, 3)
    with pytest.raises(RefusedError, match="itself, not LSTM"):
        gradient_horizon(nn.LSTM(3, 4), inputs)
    with pytest.raises(ValueError, match="not all states are finite"):
        gradient_horizon(nn.RNN(3, 4), inputs * float("nan"))
    with pytest.raises(ValueError, match="not a PackedSequence"):
        gradient_horizon(nn.RNN(3, 4), nn.utils.rnn.pack_sequence([inputs[:, 0]]))
    with pytest.raises(ValueError, match="between 0 and 1"):
        gradient_horizon(nn.RNN(3, 4), inputs, share=2.0)


def test_a_horizon_of_a_gradient_that_leaves_a_floats_range_is_everything() -> None:
    rnn = nn.RNN(1, 2)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(2 * torch.eye(2))
        for weight in (rnn.weight_ih_l0, rnn.bias_ih_l0, rnn.bias_hh_l0):
            weight.zero_()
    found = gradient_horizon(rnn, torch.zeros(200, 1, 1))
    assert (found.steps, found.truncation_pays) == (200, False)


def test_a_horizon_of_one_sequence() -> None:
    rnn = nn.RNN(3, 4, batch_first=True)
    inputs = torch.randn(40, 3)
    assert gradient_horizon(rnn, inputs) == gradient_horizon(rnn, inputs.unsqueeze(0))
