"""A last step that the script did not finish is no step to average over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stepscope.step.steps import find_steps
from stepscope.step.work import find_work

from .build import Events, note, op, step

if TYPE_CHECKING:
    from .conftest import Read

NODE = "autograd::engine::evaluate_function: MmBackward0"


def three_steps(read: Read, *inside: list[Events]) -> int:
    """The number of steps that averages are taken over, on a CPU."""
    events: list[Events] = [step(n, start=100.0 * n, dur=100) for n in range(3)]
    events += [op("aten::mm", start=100.0 * n + 1, dur=20) for n in range(3)]
    trace = read(*events, *(one for some in inside for one in some))
    return len(find_steps(trace, find_work(trace)).cycles_ns)


def backward(number: int) -> Events:
    return op(NODE, start=100.0 * number + 30, dur=20)


def update(number: int, at: float) -> Events:
    return note("Optimizer.step#Adam.step", start=100.0 * number + at, dur=5)


@pytest.mark.parametrize(("last", "count"), [([], 2), ([backward(2)], 3)])
def test_without_marks_of_an_optimizer_its_backward_tells(
    read: Read, last: list[Events], count: int
) -> None:
    """A compiled optimizer step leaves no mark."""
    assert three_steps(read, [backward(0), backward(1)], last) == count


@pytest.mark.parametrize(("last", "count"), [([update(2, 30)], 2), ([], 2)])
def test_two_optimizers_must_both_have_stepped(read: Read, last: list[Events], count: int) -> None:
    both = [update(n, at) for n in range(2) for at in (30, 60)]
    assert three_steps(read, both, last) == count


def test_a_whole_last_step_counts(read: Read) -> None:
    assert three_steps(read, [update(n, at) for n in range(3) for at in (30, 60)]) == 3
