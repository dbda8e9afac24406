"""A step that first plays without gradients, then trains: autocast begins with training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benches import analyse
from explain.build import AUTOGRAD, MAIN, kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.engine import Bench
from stepscope.predict.step_spans import find_before_training
from stepscope.predict.whatifs import precision

if TYPE_CHECKING:
    from pathlib import Path

STEP_US, KERNEL_US = 4000.0, 300.0
PRODUCT = {"shapes": [[4096, 1024], [1024, 1024]], "dtypes": ["float", "float"]}
PLAYED, TRAINED, JUDGED, GRADIENT = range(4)


def bench(folder: Path, *, with_gradients: bool = False) -> Bench:
    """A product before training, one that is trained, one without gradients after it, and the
    gradient."""
    events: list[dict[str, Any]] = []
    for number in range(3):
        at = number * STEP_US
        events += step(number, start=at, dur=STEP_US)
        first = {"sequence": 10 * number} if with_gradients else {}
        for sequence in (first, {"sequence": 10 * number + 1}, {}):
            at += 200
            events += op("aten::mm", start=at, dur=90, **PRODUCT, **sequence)
            events += kernel("gemm", start=at + 20, dur=KERNEL_US, launched_at=at + 5)
        at += 1000
        linked = {"sequence": 10 * number + 1, "forward_thread": MAIN, "thread": AUTOGRAD}
        events += op("MmBackward0", start=at, dur=90, **linked)
        events += op("aten::mm", start=at + 2, dur=80, thread=AUTOGRAD, **PRODUCT)
        events += kernel("gemm", start=at + 20, dur=KERNEL_US, launched_at=at + 5, thread=AUTOGRAD)
    return Bench(analyse(read_trace(write(folder / "made.json", events, device="NVIDIA H200"))))


def test_only_what_comes_before_the_training_pass_is_outside_of_autocast(tmp_path: Path) -> None:
    found = find_before_training(bench(tmp_path).context)
    assert found.tolist() == [True, False, False, False]


def test_a_frozen_layer_is_part_of_the_training_pass(tmp_path: Path) -> None:
    """Backward does not follow it, but gradients were enabled."""
    assert not find_before_training(bench(tmp_path, with_gradients=True).context).any()


@pytest.mark.parametrize("value", ["bf16", "tf32"])
def test_autocast_leaves_it_alone_and_tf32_does_not(tmp_path: Path, value: str) -> None:
    context = bench(tmp_path).context
    outcome = precision.predict(context, value)
    tasks = outcome.context.graph.tasks
    new = tasks.dur_ns[tasks.row >= 0] / context.graph.tasks.dur_ns
    assert (new[PLAYED] == 1.0) == (value == "bf16")
    assert max(new[TRAINED], new[JUDGED], new[GRADIENT]) < 0.5
    said = [text for text in outcome.assumptions if "outside autocast" in text]
    assert len(said) == (value == "bf16")
