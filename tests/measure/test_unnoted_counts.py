"""However a training ends its steps, those that are not noted are counted exactly."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import stepscope
from stepscope.measure.steps.pace import Pace
from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.step_files import read_step_columns

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

torch: Any = pytest.importorskip("torch")

STEPS = 400


@pytest.fixture(autouse=True)
def few_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "_distance", lambda _pace: 16)


def counted(folder: Path, train: Callable[[], None], **options: Any) -> int:
    began = time.perf_counter_ns()
    with stepscope.watch(folder, step_on="auto", memory=False, **options):
        train()
    took = time.perf_counter_ns() - began
    oddities = Oddities("steps.jsonl")
    steps = read_step_columns(folder / "rank-00000", oddities)
    assert steps is not None
    assert not oddities.notes
    assert (np.diff(steps.number) == 1).all()
    assert steps.wall_ns.sum() <= took
    return len(steps)


def parts(kind: Any = torch.optim.SGD) -> tuple[Any, Any]:
    model = torch.nn.Linear(4, 1)
    return model, kind(model.parameters(), lr=1e-3)


def one_pass(model: Any) -> Any:
    loss = model(torch.randn(2, 4)).square().mean()
    loss.backward()
    return loss


def one_optimizer() -> None:
    model, optimizer = parts()
    for _ in range(STEPS):
        optimizer.zero_grad()
        one_pass(model)
        optimizer.step()


def two_optimizers() -> None:
    """As a GAN has them."""
    one, two = parts(), parts(torch.optim.Adam)
    for _ in range(STEPS):
        for model, optimizer in (one, two):
            optimizer.zero_grad()
            one_pass(model)
            optimizer.step()


def the_second_goes_on_alone() -> None:
    """Its last step beside the first one then counts as well, as it does where all are noted."""
    one, two = parts(), parts(torch.optim.Adam)
    for number in range(STEPS - 1):
        for model, optimizer in (one, two) if number < STEPS // 2 else (two,):
            optimizer.zero_grad()
            one_pass(model)
            optimizer.step()


def one_inside_another() -> None:
    model, inner = parts()

    class Outer(torch.optim.Optimizer):  # type: ignore[misc]
        def step(self) -> None:
            inner.step()

    outer = Outer(model.parameters(), {})
    for _ in range(STEPS):
        outer.zero_grad()
        one_pass(model)
        outer.step()


def new_optimizers() -> None:
    """One for each stage of the training."""
    model = torch.nn.Linear(4, 1)
    for _ in range(4):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(STEPS // 4):
            optimizer.zero_grad()
            one_pass(model)
            optimizer.step()


def some_steps_fail() -> None:
    """And are tried again."""

    class Fails(torch.optim.SGD):  # type: ignore[misc]
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls % 7 == 0:
                raise ValueError
            return super().step(closure)

    model, optimizer = parts(Fails)
    done = 0
    while done < STEPS:
        optimizer.zero_grad()
        one_pass(model)
        try:
            optimizer.step()
            done += 1
        except ValueError:
            continue


def closures() -> None:
    model, optimizer = parts(torch.optim.LBFGS)

    def closure() -> Any:
        optimizer.zero_grad()
        return one_pass(model)

    for _ in range(STEPS):
        optimizer.step(closure)


def accumulated() -> None:
    model, optimizer = parts()
    for _ in range(STEPS):
        for _ in range(3):
            one_pass(model)
        optimizer.step()
        optimizer.zero_grad()


def by_hand(passes: int = 1) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 1))
    for _ in range(STEPS):
        for _ in range(passes):
            (torch.randn(2, 4) @ weight).square().mean().backward()
        with torch.no_grad():
            weight -= 1e-3 * weight.grad
        weight.grad = None


def by_hand_accumulated() -> None:
    by_hand(3)


def scaled() -> None:
    """Every ninth step is skipped, and still one."""
    model, optimizer = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).square().mean()
        scaler.scale(loss * (float("inf") if number % 9 == 8 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    "train",
    [
        one_optimizer,
        two_optimizers,
        the_second_goes_on_alone,
        one_inside_another,
        new_optimizers,
        some_steps_fail,
        closures,
        accumulated,
        scaled,
    ],
)
def test_steps_are_counted_exactly(train: Callable[[], None], tmp_path: Path) -> None:
    assert counted(tmp_path, train) == STEPS


@pytest.mark.parametrize("train", [by_hand, by_hand_accumulated])
def test_passes_are_counted_as_where_all_steps_are_noted(
    train: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes some to see that an optimizer, which other tests have created, does not step."""
    thinned = counted(tmp_path / "thinned", train)
    monkeypatch.setattr(Pace, "_distance", lambda _pace: 1)
    assert thinned == counted(tmp_path / "all", train)
    assert thinned >= STEPS - 10


def test_few_of_them_are_noted(tmp_path: Path) -> None:
    for train in (one_optimizer, two_optimizers, accumulated, by_hand):
        folder = tmp_path / train.__name__
        counted(folder, train)
        steps = read_step_columns(folder / "rank-00000", Oddities("steps.jsonl"))
        assert steps is not None
        assert steps.noted.mean() < 0.3


def test_so_are_those_of_a_thread(tmp_path: Path) -> None:
    def train() -> None:
        thread = threading.Thread(target=one_optimizer)
        thread.start()
        thread.join()

    assert counted(tmp_path, train) == STEPS


def test_so_are_those_that_the_script_ends(tmp_path: Path) -> None:
    model, optimizer = parts()
    with stepscope.watch(tmp_path, memory=False) as run:
        for _ in range(STEPS):
            for _ in range(2):
                optimizer.zero_grad()
                one_pass(model)
                optimizer.step()
            run.step()
    steps = read_step_columns(tmp_path / "rank-00000", Oddities("steps.jsonl"))
    assert steps is not None
    assert len(steps) == STEPS
    assert steps.noted.mean() < 0.6


def test_torch_is_as_before_after_a_watch_that_ends_in_a_stretch(tmp_path: Path) -> None:
    before = torch.autograd._engine_run_backward
    counted(tmp_path, one_optimizer)
    assert torch.autograd._engine_run_backward is before
    assert torch.autograd.graph._engine_run_backward is before


def test_another_hook_around_the_engine_stays(tmp_path: Path) -> None:
    """Put there during the training, by somebody else."""
    model, optimizer = parts()
    calls = []
    original = torch.autograd._engine_run_backward

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    with stepscope.watch(tmp_path, step_on="auto", memory=False):
        for number in range(STEPS):
            if number == STEPS // 2:
                torch.autograd._engine_run_backward = theirs
            optimizer.zero_grad()
            one_pass(model)
            optimizer.step()
    try:
        assert torch.autograd._engine_run_backward is theirs
        assert len(calls) == STEPS // 2
    finally:
        torch.autograd._engine_run_backward = original
