"""Attention of single operators in fp32, which flash attention takes in bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from backward_graphs import FLOAT, graph_of

from benches import analyse
from explain.build import AUTOGRAD, MAIN, kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.autocast import find_attention_nodes
from stepscope.predict.engine import Bench
from stepscope.predict.peak_memory.backward_graph import MemoryChange, hold
from stepscope.predict.peak_memory.passes import replay_backward
from stepscope.predict.whatifs import predict_change
from stepscope.records.memory import CapturedBackward, CapturedMemory
from stepscope.records.rank import MemoryInputs

if TYPE_CHECKING:
    from pathlib import Path

STEP_US = 4000.0
QUERY, KEY = [8, 16, 512, 64], [8, 4, 512, 64]  # four heads of the query share one of the key
MASK = [8, 1, 512, 512]
NODES = ("BmmBackward0", "SafeSoftmaxBackward0", "BmmBackward0")
HEAD = [[4096, 1024], [1024, 1024]]


def bench(
    folder: Path, *, mask: list[int] | None = None, graph: CapturedBackward | None = None
) -> Bench:
    """One attention of three operators and a product after it; kernels of 300 us, launched every
    100 us."""
    events: list[dict[str, Any]] = []
    attention = {"shapes": [QUERY, KEY, KEY, mask or []], "dtypes": ["float"] * 3 + ["float"]}
    pairs = {"shapes": [[128, 512, 64], [128, 64, 512]], "dtypes": ["float", "float"]}
    for number in range(3):
        at = number * STEP_US
        events += step(number, start=at, dur=STEP_US)
        events += op("aten::scaled_dot_product_attention", start=at, dur=390, **attention)
        events += op("aten::_scaled_dot_product_attention_math", start=at + 1, dur=380, **attention)
        for place, name in enumerate(("aten::bmm", "aten::_safe_softmax", "aten::bmm")):
            begin = at + 10 + 100 * place
            events += op(name, start=begin, dur=90, sequence=10 * number + place, **pairs)
            events += kernel("scores", start=begin + 20, dur=70, launched_at=begin + 5)
        at += 400
        events += op(
            "aten::mm", start=at, dur=50, shapes=HEAD, dtypes=["float"] * 2,
            sequence=10 * number + 3,
        )  # fmt: skip
        events += kernel("head", start=at + 20, dur=300, launched_at=at + 5)
        for place, node in reversed(list(enumerate((*NODES, "MmBackward0")))):
            at += 400
            linked = {"sequence": 10 * number + place, "forward_thread": MAIN, "thread": AUTOGRAD}
            events += op(node, start=at, dur=300, **linked)
            for launch in range(2):
                begin = at + 10 + 100 * launch
                events += kernel(
                    "gradient", start=begin + 20, dur=70, launched_at=begin, thread=AUTOGRAD
                )
    trace = read_trace(write(folder / "made.json", events, device="NVIDIA H200"))
    memory = MemoryInputs(captured=CapturedMemory(device="cuda", graph=graph))
    return Bench(analyse(trace, memory=memory))


def traced_kernels(made: Bench, value: str) -> list[str]:
    """That are left after the change."""
    graph, trace = (
        predict_change("precision", made.context, value).context.graph,
        made.context.trace,
    )
    rows = graph.tasks.row[graph.tasks.row >= 0]
    return [trace.strings[trace.device.name[row]] for row in rows.tolist()]


def test_in_bf16_one_kernel_is_left_of_forward_and_three_of_backward(tmp_path: Path) -> None:
    made = bench(tmp_path)
    # Two gradients more are those of the product after it.
    assert traced_kernels(made, "bf16") == ["scores", "head"] + ["gradient"] * (2 + 3)


def test_their_launches_no_longer_cost_the_host(tmp_path: Path) -> None:
    made = bench(tmp_path)
    after = predict_change("precision", made.context, "bf16").context.graph
    kept = after.calls.row >= 0
    assert len(made.context.graph.calls) - int(kept.sum()) == 2 + 3
    own = after.calls.gap_ns[kept] + after.calls.call_ns[kept]
    assert own.sum() < made.context.graph.host_ns - 300e3


@pytest.mark.parametrize("value", ["tf32", "fp8"])
def test_other_precisions_do_not_fuse_it(tmp_path: Path, value: str) -> None:
    assert traced_kernels(bench(tmp_path), value).count("scores") == 3


def test_attention_with_a_mask_stays_as_it_is(tmp_path: Path) -> None:
    assert traced_kernels(bench(tmp_path, mask=MASK), "bf16").count("scores") == 3


def graph() -> CapturedBackward:
    """Query, key and value of 10 each come from products; 100 scores."""
    whole = [
        *(["MmBackward0", 0, [[10, FLOAT]], [[-1, 0]], []] for _ in range(3)),
        ["BmmBackward0", 0, [[100, FLOAT]], [[0, 0], [1, 0]],
         [["self", 0, 10, FLOAT], ["mat2", 1, 10, FLOAT]]],
        ["SafeSoftmaxBackward0", 0, [[100, FLOAT]], [[3, 0]], [["result", 2, 100, FLOAT]]],
        ["BmmBackward0", 0, [[10, FLOAT]], [[4, 0], [2, 0]],
         [["self", 2, 100, FLOAT], ["mat2", 3, 10, FLOAT]]],
        ["SumBackward0", 0, [[1, FLOAT]], [[5, 0]], []],
    ]  # fmt: skip
    storages = [[40, "activation"], [40, "activation"], [400, "activation"], [40, "activation"]]
    return graph_of(whole, storages)


def kept_and_peak(**change: Any) -> tuple[float, float]:
    held = hold(graph(), "cuda", MemoryChange(autocast=True, **change))
    levels = replay_backward(held, keeps_gradients=False)
    return levels.kept_bytes, levels.peak_bytes


def test_fused_it_keeps_its_narrow_inputs_and_result_and_no_scores() -> None:
    kept, peak = kept_and_peak(fused_attention=((3, 4, 5),))
    assert kept == 4 * 20
    # The gradients of the result and of the three inputs, narrow as they are.
    assert peak == kept + 4 * 20


def test_of_single_operators_it_keeps_the_scores_in_fp32() -> None:
    kept, peak = kept_and_peak()
    assert kept > 400
    assert peak > 800


def test_the_nodes_of_the_graph_are_found_by_the_trace(tmp_path: Path) -> None:
    nodes = [[name, 0, [[10, FLOAT]], [], []] for name in (*NODES, "MmBackward0")]
    captured = graph_of(nodes)
    assert find_attention_nodes(bench(tmp_path, graph=captured).context) == ((0, 1, 2),)
