"""What a convolution needs beside its tensors: copies on tensor cores, workspaces in fp32."""

from __future__ import annotations

import pytest
from backward_graphs import FLOAT, graph_of
from msgspec.structs import replace

from stepscope.predict.peak_memory.backward_graph import (
    ConvolutionLayout,
    HeldGraph,
    MemoryChange,
    hold,
)
from stepscope.predict.peak_memory.passes import GraphLevels, TracedPasses, layout_copies_bytes
from stepscope.predict.peak_memory.peak import (
    find_workspace,
    later_peak,
    other_algorithms_peak,
    passes_then,
    unsure_workspace,
)
from stepscope.records.memory import CapturedMemory, CapturedPeak, CapturedPhase

# relu [800] -> convolution (weight of 90, result [400]) -> relu -> sum.
GRAPH = graph_of(
    [
            ["ReluBackward0", 0, [[800, FLOAT]], [[-1, 0]], [["result", 0, 800, FLOAT]]],
            ["ConvolutionBackward0", 0, [[400, FLOAT]], [[0, 0], [4, 0]],
             [["input", 0, 800, FLOAT], ["weight", 1, 90, FLOAT]]],
            ["ReluBackward0", 0, [[400, FLOAT]], [[1, 0]], [["result", 2, 400, FLOAT]]],
            ["SumBackward0", 0, [[1, FLOAT]], [[2, 0]], []],
            ["AccumulateGrad", -1, [[90, FLOAT]], [], []],
        ],
    [[3200, "activation"], [360, "state"], [1600, "activation"]],
)  # fmt: skip
INPUT, RESULT, WEIGHT = 3200, 1600, 360
LAYOUT = ConvolutionLayout(place=1, inputs=16, outputs=8)
STATES, WORKSPACE = 1_000, 50_000


def held(layout: ConvolutionLayout = LAYOUT, **change: bool) -> HeldGraph:
    return hold(GRAPH, "cuda", MemoryChange(layout_copies=(layout,), **change))


def levels(phase: str = "forward", layout: ConvolutionLayout = LAYOUT) -> GraphLevels:
    """The peak is in the convolution, with a workspace; it ran in fp32."""
    traced = TracedPasses(convolves_in_fp32=True, fp32_convolutions=(layout,))
    plain = GraphLevels(CapturedMemory(device="cuda", graph=GRAPH))
    # In forward the first result is kept by then; in backward the last one is gone.
    categories = {"activations": INPUT, "gradients": 0}
    level = (
        plain.backward(MemoryChange()).at(1)
        if phase == "backward"
        else next(node.peak_bytes for node in plain.forward(MemoryChange()) if node.place == 1)
    )
    captured = CapturedMemory(
        device="cuda",
        graph=GRAPH,
        peak=CapturedPeak(
            categories={**categories, "gradients": 360 if phase == "backward" else 0},
            phase=phase,
            allocated_bytes=round(STATES + level + WORKSPACE),
        ),
        phases=[
            CapturedPhase(
                phase="forward",
                categories={"activations": INPUT + RESULT, "gradients": 0},
                allocated_bytes=STATES + INPUT + RESULT,
            )
        ],
    )
    return GraphLevels(captured, traced)


def test_input_and_result_are_copied_in_forward() -> None:
    assert layout_copies_bytes(held(), 1, backward=False) == INPUT + RESULT + WEIGHT
    assert layout_copies_bytes(held(), 2, backward=False) == 0


def test_backward_copies_the_inputs_gradient_too() -> None:
    assert layout_copies_bytes(held(), 1, backward=True) == 2 * (INPUT + WEIGHT) + RESULT


def test_copies_are_as_narrow_as_the_tensors() -> None:
    narrow = layout_copies_bytes(held(autocast=True), 1, backward=False)
    assert narrow == (INPUT + RESULT + WEIGHT) / 2


@pytest.mark.parametrize(("autocast", "times"), [(False, 4 / 3), (True, 8 / 3)])
def test_channels_are_filled_up_to_16_bytes(autocast: bool, times: float) -> None:
    three = held(ConvolutionLayout(place=1, inputs=3, outputs=8), autocast=autocast)
    width = 0.5 if autocast else 1.0
    copies = layout_copies_bytes(three, 1, backward=False)
    assert copies == pytest.approx(width * (INPUT * times + RESULT + WEIGHT))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_on_tensor_cores_copies_stand_in_for_the_workspace_of_fp32(phase: str) -> None:
    captured = levels(phase)
    assert captured.captured.peak is not None
    present = float(captured.captured.peak.allocated_bytes or 0)
    assert find_workspace(captured).size_bytes == WORKSPACE
    change = MemoryChange(tf32=True, layout_copies=(LAYOUT,))
    peak, doubt = passes_then(captured, present, change)
    forward = max(node.peak_bytes for node in captured.forward(change))
    assert peak == STATES + max(forward, captured.backward(change).peak_bytes)
    assert peak < present - 0.5 * WORKSPACE
    assert (doubt > 0) == (phase == "backward")  # where the peak then is
    assert passes_then(captured, present, MemoryChange())[0] == present


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_half_of_a_workspace_that_cudnn_chose_grows_with_the_batch(phase: str) -> None:
    captured = levels(phase)
    twice = later_peak(captured, 2.0)
    assert captured.captured.peak is not None
    now = captured.captured.peak.allocated_bytes
    assert twice is not None
    assert now is not None
    grown = twice - now
    assert 0.5 * WORKSPACE < grown < 0.5 * WORKSPACE + 2 * (INPUT + RESULT) + INPUT
    assert unsure_workspace(captured, 2.0) == 0.5 * WORKSPACE


def test_a_larger_batch_may_get_fourier_transforms_unless_it_is_strided() -> None:
    captured = levels()
    tensors = 4 * 2 * (INPUT + RESULT)
    assert other_algorithms_peak(captured, 2.0) > STATES + tensors + 100 * WEIGHT
    strided = levels(layout=ConvolutionLayout(place=1, inputs=16, outputs=8, strided=True))
    assert other_algorithms_peak(strided, 2.0) == 0
    assert other_algorithms_peak(captured, 0.5) == 0


# A convolution's backward, as autograd.grad(create_graph=True) makes a node of it: the gradient of
# its result has 400 elements, its input 800.
SECOND = graph_of(
    [
            ["ConvolutionBackwardBackward0", 0, [[800, FLOAT], [1, FLOAT], [1, FLOAT]],
             [[-1, 0], [-1, 0], [1, 0]],
             [["grad_output", 0, 400, FLOAT], ["input", 1, 800, FLOAT], ["weight", 2, 90, FLOAT]]],
            ["AccumulateGrad", -1, [[90, FLOAT]], [], []],
        ],
    [[1600, "activation"], [3200, "activation"], [360, "state"]],
)  # fmt: skip


def test_the_backward_of_a_backward_exchanges_samples_and_channels_before_it_copies() -> None:
    layout = ConvolutionLayout(place=0, inputs=16, outputs=8)
    change = MemoryChange(tf32=True, layout_copies=(layout,))
    twice = layout_copies_bytes(hold(SECOND, "cuda", change), 0, backward=True)
    assert twice == 2 * (INPUT + RESULT)


def test_what_it_differentiates_is_a_backward_and_runs_when_the_graph_is_made() -> None:
    layout = ConvolutionLayout(place=0, inputs=16, outputs=8)
    change = MemoryChange(tf32=True, layout_copies=(layout,))
    made = layout_copies_bytes(hold(SECOND, "cuda", change), 0, backward=False)
    assert made == 2 * (INPUT + WEIGHT) + RESULT


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_copies_do_not_come_on_top_of_what_nobody_could_name(phase: str) -> None:
    """No node fits the peak, whose graph was not kept: the workspace may be any convolution's."""
    named = levels(phase).captured
    assert named.peak is not None
    other = replace(named.peak, categories={"activations": 77_000, "gradients": 0})
    captured = GraphLevels(replace(named, peak=other), levels(phase).traced)
    present = float(named.peak.allocated_bytes or 0)
    tf32 = MemoryChange(tf32=True, layout_copies=(LAYOUT,))
    assert passes_then(captured, present, tf32)[0] == pytest.approx(present)
