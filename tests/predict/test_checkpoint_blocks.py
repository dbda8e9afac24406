"""checkpoint=blocks by the run's own graph of modules: what runs again, and where it stops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from backward_graphs import graph_of

from benches import analyse
from explain.build import AUTOGRAD, MAIN, call, kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.declaration import Refused
from stepscope.predict.engine import Bench
from stepscope.predict.step_spans import find_block_spans
from stepscope.predict.whatifs import predict_change
from stepscope.records.memory import CapturedBackward, CapturedMemory
from stepscope.records.rank import MemoryInputs
from stepscope.step.graph import CallKind, Phase

if TYPE_CHECKING:
    from pathlib import Path

STEP_US = 10_000.0
# Of each operator: its node, and what that keeps.
OPERATORS = {
    "aten::native_layer_norm": ("NativeLayerNormBackward0", ["input", "result1"]),
    "aten::mm": ("MmBackward0", ["self", "mat2"]),
    "aten::relu": ("ReluBackward0", ["result"]),
    "aten::add": ("AddBackward0", []),
}
BLOCK = ("aten::native_layer_norm", "aten::mm", "aten::relu", "aten::mm", "aten::add")
# Three stages, each of another width: no product repeats. Microseconds of each kernel of forward.
STAGES = {"0": 10.0, "1": 20.0, "2": 40.0}


def operators(*, passes: int = 1) -> list[tuple[str, str, float]]:
    """Module, operator and microseconds of its kernel."""
    blocks = [(f"stages.{name}", oper, us) for name, us in STAGES.items() for oper in BLOCK]
    return [*blocks, ("head", "aten::mm", 5.0)] * passes


def graph() -> CapturedBackward:
    modules = [["", "Net", 700, False], ["head", "Linear", 100, False]]
    for name in STAGES:
        modules += [[f"stages.{name}", "Stage", 200, False]]
        modules += [[f"stages.{name}.fc", "Linear", 200, False]]
    place = {path: number for number, (path, *_) in enumerate(modules)}
    nodes: list[Any] = []
    for number, (module, name, _) in enumerate(operators()):
        node, kept = OPERATORS[name]
        saved = [[field, 0, 1, "float32"] for field in kept]
        nodes.append([node, place[module], [[1, "float32"]], [[number - 1, 0]], saved])
    return graph_of(nodes, [[4, "activation"]], modules)


def bench(
    folder: Path,
    captured: CapturedBackward,
    *,
    passes: int = 1,
    gathers: bool = False,
    waits: bool = False,
) -> Bench:
    """`gathers`: the first block begins with an operator on data, which has no gradient. `waits`:
    every relu ends with a wait for the device."""
    events: list[dict[str, Any]] = []
    made = operators(passes=passes)
    for number in range(3):
        at = number * STEP_US
        events += step(number, start=at, dur=STEP_US)
        if gathers:
            events += op("aten::gather", start=at, dur=40, shapes=[[8, 8]])
            events += kernel("forward", start=at + 20, dur=7.0, launched_at=at + 5)
            at += 100
        for place, (_, name, us) in enumerate(made):
            events += op(name, start=at, dur=40, sequence=1000 * number + place, shapes=[[8, 8]])
            events += kernel("forward", start=at + 20, dur=us, launched_at=at + 5)
            if waits and name == "aten::relu":
                events += call("cudaStreamSynchronize", start=at + 15, dur=7.0 + us)
            at += 100
        for place, (_, name, us) in reversed(list(enumerate(made))):
            node = OPERATORS[name][0]
            linked = {"sequence": 1000 * number + place, "forward_thread": MAIN, "thread": AUTOGRAD}
            events += op(f"autograd::engine::evaluate_function: {node}", start=at, dur=60, **linked)
            events += op(node, start=at + 2, dur=50, **linked)
            events += kernel("backward", start=at + 20, dur=us, launched_at=at + 5, thread=AUTOGRAD)
            at += 100
    trace = read_trace(write(folder / "made.json", events, device="NVIDIA H200"))
    memory = MemoryInputs(captured=CapturedMemory(device="cuda", graph=captured))
    return Bench(analyse(trace, memory=memory))


def recomputed_us(made: Bench) -> list[float]:
    """Kernels that the step has more, in the order of their launches."""
    tasks = predict_change("checkpoint", made.context, "blocks").context.graph.tasks
    found: list[float] = (tasks.dur_ns[tasks.row < 0] / 1e3).tolist()
    return found


def test_every_block_runs_again_whatever_its_shapes_are_and_the_head_does_not(
    tmp_path: Path,
) -> None:
    """The last product of a block keeps its inputs only, so it does not run again; nor does the sum
    after it, of which nothing is kept. The last block comes first."""
    again = recomputed_us(bench(tmp_path, graph()))
    assert again == pytest.approx([40] * 3 + [20] * 3 + [10] * 3)


def test_a_block_runs_again_right_before_its_own_backward(tmp_path: Path) -> None:
    made = bench(tmp_path, graph())
    after = predict_change("checkpoint", made.context, "blocks").context.graph
    backward = np.flatnonzero(after.calls.phase == Phase.BACKWARD)
    is_new = (after.calls.row[backward] < 0).tolist()
    head, block = [False], [True] * 3 + [False] * len(BLOCK)
    assert is_new == head + block * 3


def test_an_operator_whose_result_is_kept_runs_again_at_the_end_of_a_block(tmp_path: Path) -> None:
    whole = graph()
    for node in whole.nodes:
        if node.name == "AddBackward0":
            node.saved.extend(whole.nodes[2].saved)  # a result, as relu keeps it
    assert len(recomputed_us(bench(tmp_path, whole))) == 3 * len(BLOCK)


def test_each_of_several_passes_of_a_step_has_its_blocks(tmp_path: Path) -> None:
    made = bench(tmp_path, graph(), passes=2)
    assert len(find_block_spans(made.context)) == 6


def test_a_view_that_is_changed_in_place_has_another_name_in_the_graph(tmp_path: Path) -> None:
    whole = graph()
    place = [node.name for node in whole.nodes].index("AddBackward0")
    sliced = msgspec.structs.replace(whole.nodes[place], name="torch::autograd::CopySlices")
    whole.nodes[place] = sliced
    assert len(find_block_spans(bench(tmp_path, whole).context)) == 3


def test_a_view_that_autograd_made_again_is_not_in_the_trace(tmp_path: Path) -> None:
    whole = graph()
    place = [node.name for node in whole.nodes].index("AddBackward0")
    changed = msgspec.structs.replace(whole.nodes[place], name="torch::autograd::CopySlices")
    edge = msgspec.structs.replace(changed.inputs[0], node=place)
    view = msgspec.structs.replace(changed, name="AsStridedBackward0", inputs=[edge], saved=[])
    whole.nodes[place : place + 1] = [changed, view]
    assert len(find_block_spans(bench(tmp_path, whole).context)) == 3


def test_operators_on_data_at_the_beginning_of_a_block_run_again(tmp_path: Path) -> None:
    """They create no nodes of backward."""
    again = recomputed_us(bench(tmp_path, graph(), gathers=True))
    assert again == pytest.approx([40] * 3 + [20] * 3 + [7] + [10] * 3)


def test_operators_before_a_block_that_needs_a_gradient_do_not(tmp_path: Path) -> None:
    whole = graph()
    edge = msgspec.structs.replace(whole.nodes[1].inputs[0], node=len(whole.nodes) - 1)
    whole.nodes[0] = msgspec.structs.replace(whole.nodes[0], inputs=[edge])
    again = recomputed_us(bench(tmp_path, whole, gathers=True))
    assert 7 not in again


def test_a_graph_of_another_step_says_nothing(tmp_path: Path) -> None:
    other = graph()
    other.nodes.pop()
    made = bench(tmp_path, other)
    assert find_block_spans(made.context) == []
    with pytest.raises(Refused, match="no repeated blocks"):
        predict_change("checkpoint", made.context, "blocks")


def test_waits_of_a_block_run_again_with_it(tmp_path: Path) -> None:
    """Where the host reads a value, as experts read how many rows are theirs."""
    before = bench(tmp_path, graph(), waits=True).context
    after = predict_change("checkpoint", before, "blocks").context.graph.calls
    assert (before.graph.calls.kind == CallKind.WAIT).sum() == 3
    again = after.kind[(after.phase == Phase.BACKWARD) & (after.row < 0)].tolist()
    assert again == [CallKind.LAUNCH, CallKind.LAUNCH, CallKind.LAUNCH, CallKind.WAIT] * 3
    assert recomputed_us(bench(tmp_path, graph(), waits=True)) == recomputed_us(
        bench(tmp_path, graph())
    )


def test_python_takes_time_for_each_tensor_that_a_block_keeps(tmp_path: Path) -> None:
    """7 of each of three blocks, then 10 more; 25 microseconds each in both passes."""
    whole = graph()
    few = predict_change("checkpoint", bench(tmp_path, whole).context, "blocks")
    whole.nodes[1].saved.extend(whole.nodes[1].saved * 5)
    many = predict_change("checkpoint", bench(tmp_path, whole).context, "blocks")
    added_ns = many.context.graph.host_ns - few.context.graph.host_ns
    assert added_ns == pytest.approx(10 * 25_000)
    assert many.doubt > 0.0
