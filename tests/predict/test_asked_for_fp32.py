"""`logits.float()` does nothing in an fp32 step, and a wide copy under autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from backward_graphs import FLOAT, graph_of

from benches import analyse
from explain.build import AUTOGRAD, MAIN, kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.autocast import find_wide_reads
from stepscope.predict.engine import Bench
from stepscope.predict.peak_memory.backward_graph import MemoryChange, hold
from stepscope.predict.peak_memory.passes import replay_backward
from stepscope.records.memory import CapturedMemory
from stepscope.records.rank import MemoryInputs

if TYPE_CHECKING:
    from pathlib import Path

STEP_US = 4000.0
LOGITS = [8, 100]
# Logits [8, 100] of a product with a frozen weight, and the two operators of a cross entropy.
GRAPH = graph_of(
    [
        ["MmBackward0", 0, [[800, FLOAT]], [[-1, 0]], [["self", 0, 16, FLOAT]]],
        ["LogSoftmaxBackward0", 0, [[800, FLOAT]], [[0, 0]], [["result", 1, 800, FLOAT]]],
        ["NllLossBackward0", 0, [[1, FLOAT]], [[1, 0]], [["self", 1, 800, FLOAT]]],
    ],
    [[64, "input"], [3200, "activation"]],
)
OPERATORS = ("aten::mm", "aten::log_softmax", "aten::nll_loss")


def bench(folder: Path, *, asked: dict[str, Any] | None = None, around: str = "") -> Bench:
    """`asked` are arguments of a call of aten::to between the product and the loss; `around` is the
    operator that makes it, none for the script itself."""
    events: list[dict[str, Any]] = []
    for number in range(3):
        at = number * STEP_US
        events += step(number, start=at, dur=STEP_US)
        for place, name in enumerate(OPERATORS):
            if place == 1 and asked:
                events += op(around, start=at, dur=30, shapes=[LOGITS]) if around else []
                events += op("aten::to", start=at + 2, dur=5, **asked)
                at += 100
            events += op(name, start=at, dur=40, sequence=10 * number + place, shapes=[LOGITS])
            events += kernel("forward", start=at + 20, dur=50, launched_at=at + 5)
            at += 100
        for place, node in reversed(list(enumerate(GRAPH.nodes))):
            linked = {"sequence": 10 * number + place, "forward_thread": MAIN, "thread": AUTOGRAD}
            events += op(node.name, start=at, dur=50, **linked)
            events += kernel("backward", start=at + 20, dur=50, launched_at=at + 5, thread=AUTOGRAD)
            at += 100
    trace = read_trace(write(folder / "made.json", events, device="NVIDIA H200"))
    memory = MemoryInputs(captured=CapturedMemory(device="cuda", graph=GRAPH))
    return Bench(analyse(trace, memory=memory))


def call(shape: list[int], dtype: str, concrete: list[str]) -> dict[str, Any]:
    return {"shapes": [shape, [], []], "dtypes": [dtype, "Scalar", ""], "concrete": concrete}


@pytest.mark.parametrize("concrete", [["", "6", "False"], ["", "", "6"]])  # by dtype, with a device
def test_the_newest_value_of_that_size_is_read_in_fp32(tmp_path: Path, concrete: list[str]) -> None:
    made = bench(tmp_path, asked=call(LOGITS, "float", concrete))
    assert find_wide_reads(made.context) == {(1, 0)}


@pytest.mark.parametrize(
    "asked",
    [
        None,
        call(LOGITS, "float", ["", "15", "False"]),  # bf16
        call(LOGITS, "long int", ["", "6", "False"]),  # a cast that happens in fp32 too
        call([7, 100], "float", ["", "6", "False"]),  # a value without a gradient
    ],
)
def test_other_casts_change_nothing(tmp_path: Path, asked: dict[str, Any] | None) -> None:
    assert not find_wide_reads(bench(tmp_path, asked=asked).context)


def test_casts_that_operators_make_follow_the_dtype_of_their_input(tmp_path: Path) -> None:
    """aten::pow and aten::where cast to their own result's dtype, narrow ones under autocast."""
    asked = call(LOGITS, "float", ["", "6", "False"])
    assert not find_wide_reads(bench(tmp_path, asked=asked, around="aten::pow").context)


def test_a_loss_of_wide_logits_keeps_one_wide_result() -> None:
    kept = {
        reads: hold(GRAPH, "cuda", MemoryChange(autocast=True, wide_reads=frozenset(reads)))
        for reads in ((), ((1, 0),))
    }
    # Narrow: the softmax's result, and the copy that the loss makes of it. Wide: one result for
    # both; backward has its gradient and that of the wide logits, which is then cast.
    assert kept[()].kept_bytes == 1600 + 3200 + 2 * 16
    assert kept[(1, 0),].kept_bytes == 3200 + 2 * 16
    levels = replay_backward(kept[(1, 0),], keeps_gradients=False)
    assert levels.peak_bytes == 3200 + 2 * 16 + 2 * 3200


@pytest.mark.parametrize("asks", [False, True])
def test_pytorch_keeps_the_softmax_as_wide_as_its_logits(asks: bool) -> None:
    torch = pytest.importorskip("torch")
    kept: list[Any] = []
    weight = torch.randn(4, 100, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, id),
        torch.autocast("cpu", torch.bfloat16),
    ):
        logits = torch.randn(8, 4) @ weight
        if asks:
            logits = logits.float()
        torch.log_softmax(logits, -1, dtype=logits.dtype)
    assert kept[-1].shape == (8, 100)
    assert kept[-1].dtype == (torch.float32 if asks else torch.bfloat16)
