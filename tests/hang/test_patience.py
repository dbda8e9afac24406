"""How long a run may go without a step."""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.abc import MetaPathFinder

import torch

from stepscope.measure.hang.watch import Patience, TrainingLoop, rare_phase


def after(walls_s: list[float], least_s: float = 30.0) -> Patience:
    patience = Patience(least_s)
    patience.took(3, 60.0)  # the first steps compile
    for wall_s in walls_s:
        patience.took(1, wall_s)
    return patience


def test_short_steps_have_the_least_time() -> None:
    assert after([0.01] * 50).limit_s(is_long=False) == 30.0


def test_steps_of_two_seconds_have_twenty_of_them() -> None:
    assert after([2.0] * 50).limit_s(is_long=False) == 40.0


def test_steps_of_a_minute_are_not_waited_for_twenty_times() -> None:
    assert after([60.0] * 50).limit_s(is_long=False) == 360.0


def test_one_long_step_is_twice_as_long_at_most() -> None:
    assert after([0.1] * 50 + [45.0]).limit_s(is_long=False) == 90.0


def test_what_is_known_to_be_long_has_ten_minutes() -> None:
    assert after([0.01] * 50).limit_s(is_long=True) == 600.0
    assert Patience(30.0).limit_s(is_long=False) == 600.0


def test_a_script_that_has_left_its_loop_may_take_its_time() -> None:
    loop, left = TrainingLoop(), []

    def train() -> None:
        for step in range(4):
            if step < 3:
                loop.saw(sys._getframe())
            else:
                left.append(loop.has_left(sys._getframe()))
        left.append(loop.has_left(sys._getframe()))

    train()
    assert left == [False, True]


def test_own_code_without_gradients_is_evaluation() -> None:
    phases = [rare_phase(sys._getframe())]
    with torch.no_grad():
        phases.append(rare_phase(sys._getframe()))

    @torch.inference_mode()
    def evaluate() -> None:
        phases.append(rare_phase(sys._getframe()))

    evaluate()
    assert phases == ["", "evaluation", "evaluation"]


def test_an_import_may_take_long() -> None:
    phases = []

    class Finder(MetaPathFinder):
        def find_spec(self, *_: object) -> None:
            phases.append(rare_phase(sys._getframe()))

    sys.meta_path.insert(0, Finder())
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("no_such_module_anywhere")
    finally:
        del sys.meta_path[0]
    assert phases == ["import"]
