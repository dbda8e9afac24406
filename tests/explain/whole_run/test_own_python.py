"""What a typical step does outside the model, by samples counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.whole_run.outside_model import find_own_python
from stepscope.records.run import StepSeries
from stepscope.records.source_lines import Place, StackSamples

PACKAGES = "/x/site-packages"
MAIN = Place(file="/home/me/dqn.py", line=90, function="main")
SAMPLE = Place(file="/home/me/dqn.py", line=38, function="ReplayBuffer.sample")
CALL = Place(file=f"{PACKAGES}/torch/nn/modules/module.py", line=1, function="Module._call_impl")
FORWARD = Place(file="/home/me/dqn.py", line=50, function="Net.forward")
RELU = Place(file=f"{PACKAGES}/torch/nn/functional.py", line=1, function="relu")
BACKWARD = Place(file=f"{PACKAGES}/torch/autograd/graph.py", line=1, function="_engine_run")
ADAM = Place(file=f"{PACKAGES}/torch/optim/optimizer.py", line=1, function="wrapper")
OWN_ADAM = Place(file="/home/me/adam.py", line=4, function="Adam.step")
LOADER = Place(file=f"{PACKAGES}/torch/utils/data/dataloader.py", line=1, function="__next__")
DATASET = Place(file="/home/me/data.py", line=4, function="Digits.__getitem__")
GYM = Place(file=f"{PACKAGES}/gymnasium/core.py", line=1, function="Wrapper.step")
# Samples, and the stack that they saw.
SEEN = {
    (MAIN, SAMPLE): 30,  # the only ones outside the model, with the next
    (MAIN, GYM): 10,
    (MAIN, CALL, FORWARD): 20,
    (MAIN, CALL, FORWARD, RELU): 10,
    (MAIN, RELU): 5,
    (MAIN, BACKWARD): 10,
    (MAIN, ADAM, OWN_ADAM): 5,
    (MAIN, LOADER, DATASET): 10,
}


def series(steps: int = 100) -> StepSeries:
    nothing = np.zeros(steps, np.int64)
    return StepSeries(
        number=np.arange(steps), start_unix_ns=nothing, step_ns=nothing + 10**6,
        cause=np.where(np.arange(steps) == 50, 0, -1).astype(np.int8),
        window=np.arange(steps) == 60, warm_up=10,
    )  # fmt: skip


def samples(seen: dict[tuple[Place, ...], int], step: int) -> StackSamples:
    stack = np.repeat(np.arange(len(seen)), list(seen.values()))
    return StackSamples(stacks=tuple(seen), number=np.full(len(stack), step), stack=stack)


def test_lines_outside_the_model_are_named_with_their_share_of_the_step() -> None:
    own = find_own_python(samples(SEEN, step=70), series())
    assert own is not None
    assert (own.samples, own.share) == (100, pytest.approx(0.40))
    assert own.low == pytest.approx(0.40 - 1.96 * (0.24 / 100 + 1 / 100**2) ** 0.5)
    assert [(line.place, line.share, line.package) for line in own.lines] == [
        (SAMPLE, pytest.approx(0.30), ""),
        (MAIN, pytest.approx(0.10), "gymnasium"),
    ]


@pytest.mark.parametrize("step", [5, 50, 60], ids=["warm-up", "stall", "window"])
def test_steps_that_are_not_typical_do_not_count(step: int) -> None:
    assert find_own_python(samples(SEEN, step=step), series()) is None


def test_few_samples_say_nothing() -> None:
    assert find_own_python(samples({(MAIN, SAMPLE): 39}, step=70), series()) is None
