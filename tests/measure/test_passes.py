"""Steps told from backward passes: gradients that were reset begin a new one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stepscope.measure.steps.optimizers import Passes

Reset = Callable[[torch.Tensor], None]


def to_none(weight: torch.Tensor) -> None:
    weight.grad = None


def in_place(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.zero_()


def through_data(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.data.zero_()


def steps(reset: Reset | None, times: int, per_step: int, *, optimizer: bool = False) -> list[int]:
    """How many steps had ended after each pass of a training; the last may still be open."""
    passes, weight = Passes(), torch.nn.Parameter(torch.ones(3))
    count, seen = 0, []
    for number in range(times * per_step):
        loss = (weight * (number + 1)).sum()
        count += passes.begins(loss, optimizer_exists=optimizer)
        loss.backward()
        count += passes.ends(optimizer_exists=optimizer)
        if (number + 1) % per_step == 0:
            with torch.no_grad():
                weight.data.sub_(0.1 * weight.grad)
            if reset is not None:
                reset(weight)
        seen.append(count)
    return seen


@pytest.mark.parametrize("reset", [to_none, in_place, through_data])
def test_every_pass_is_a_step_where_gradients_are_reset_behind_it(reset: Reset) -> None:
    assert steps(reset, times=6, per_step=1) == [0, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("reset", [to_none, in_place, through_data])
def test_passes_that_add_to_gradients_are_one_step(reset: Reset) -> None:
    assert steps(reset, times=4, per_step=3)[2::3] == [0, 2, 3, 4]


def test_gradients_that_are_never_reset_count_each_pass_in_the_end() -> None:
    assert steps(None, times=11, per_step=1)[-4:] == [1, 2, 3, 4]


def test_an_optimizer_that_is_about_to_step_is_waited_for() -> None:
    """A trial pass or two before the first step of the optimizer are no steps."""
    assert steps(to_none, times=3, per_step=1, optimizer=True)[-1] == 0
    assert steps(to_none, times=8, per_step=1, optimizer=True)[-1] > 0


def test_gradients_taken_without_any_parameter_are_a_step_each() -> None:
    passes = Passes()
    ended = [
        (passes.begins(None, optimizer_exists=False), passes.ends(optimizer_exists=False))
        for _ in range(4)
    ]
    assert sum(map(sum, ended)) == 4
