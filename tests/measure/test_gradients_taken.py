"""A script that takes gradients with torch.autograd.grad has steps and losses like any other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stepscope.measure.session.trial import TrialLog

torch = pytest.importorskip("torch")

SCRIPT = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
inputs = torch.randn(8, 4)
for _ in range(40):
    loss = net(inputs).square().mean()
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients):
            parameter -= 0.1 * gradient
"""


def test_its_steps_end_where_the_next_forward_begins_and_its_losses_are_kept(
    tmp_path: Path,
) -> None:
    from stepscope.ui.tune.trials import TrialCommand

    (tmp_path / "train.py").write_text(SCRIPT)
    trial = TrialCommand(
        command=(sys.executable, str(tmp_path / "train.py")),
        home=tmp_path / "trials",
        step_on="forward",
        least_steps=20,
    ).run(1, (), steps=20, limit_s=300.0)
    assert trial.failed is None, trial.output
    values = [loss.value for loss in trial.ranks[0].losses]
    assert len(values) >= 20
    assert values == sorted(values, reverse=True)


def test_a_gradient_is_no_loss_where_backward_is_called() -> None:
    log = TrialLog(None, 0)
    log.pass_begins([torch.tensor(2.0)], 0)
    log.gradient_was_taken([torch.tensor(5.0)], 0)
    assert log._read() == [(0, (2.0).hex())]


def test_gradients_are_losses_until_a_backward_pass_comes() -> None:
    log = TrialLog(None, 0)
    log.gradient_was_taken([torch.tensor(5.0)], 0)
    log.gradient_was_taken([torch.tensor(4.0)], 1)
    assert [value for _, value in log._read()] == [(5.0).hex(), (4.0).hex()]
