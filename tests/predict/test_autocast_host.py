"""What autocast costs the host: weights are cast, results of other products are cast already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benches import bench_for
from explain.build import AUTOGRAD, MAIN, kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.whatifs import predict_change

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.predict.step_context import StepContext

WORDS, EXPERTS = [8, 512, 256], [8, 256, 1024]


def context_with(folder: Path, parameter: list[int]) -> StepContext:
    """A batched product and a linear layer's, then backward, which accumulates this gradient and
    the layer's."""
    events: list[dict[str, Any]] = []
    products = (("aten::bmm", [WORDS, EXPERTS]), ("aten::mm", [[4096, 1024], [1024, 64]]))
    for number in range(3):
        at = 2000.0 * number
        events += step(number, start=at, dur=2000)
        for place, (name, shapes) in enumerate(products):
            begin = at + 100 * place
            events += op(
                name, start=begin, dur=40, shapes=shapes, dtypes=["float"] * 2, sequence=number
            )
            events += kernel("gemm", start=begin + 20, dur=50, launched_at=begin + 5)
        linked = {"sequence": number, "forward_thread": MAIN, "thread": AUTOGRAD}
        events += op("BmmBackward0", start=at + 500, dur=50, **linked)
        events += kernel("b", start=at + 520, dur=50, launched_at=at + 505, thread=AUTOGRAD)
        for place, shape in enumerate((parameter, [1024, 64])):
            events += op(
                "torch::autograd::AccumulateGrad", start=at + 600 + 30 * place, dur=20,
                thread=AUTOGRAD, shapes=[shape], dtypes=["float"],
            )  # fmt: skip
    trace = read_trace(write(folder / "made.json", events, device="NVIDIA H200"))
    return bench_for(trace).context


def added_launches(context: StepContext) -> float:
    """The host's added time, in times of one launch."""
    after = predict_change("precision", context, "bf16").context.graph
    before = context.graph
    return (after.host_ns - before.host_ns) / (before.host_ns / 3)


def test_a_batched_product_with_experts_weights_pays_for_their_casts(tmp_path: Path) -> None:
    """1.9 launches for each product that reads a parameter."""
    of_results = added_launches(context_with(tmp_path, [3, 3]))
    of_experts = added_launches(context_with(tmp_path, EXPERTS))
    assert of_results == pytest.approx(1.9, rel=0.01)
    assert of_experts == pytest.approx(2 * 1.9, rel=0.01)
